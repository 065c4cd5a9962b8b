"""What the configuration can say and this version cannot do: refused by name, never ignored.

Flags carry their own refusals (`config.flags`); these rows are fields that have no flag of their own
because they come inside a JSON flag or from a script.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hardpoint.config.connectors import check_connector
from hardpoint.config.flags import (
    FLAGS,
    LATER,
    NO_BUDGET,
    NO_MEDIA,
    NO_RANKS,
    NO_SPEC,
    NO_TRANSFER,
    Flag,
    reason,
)
from hardpoint.config.sections import Section, VllmConfig
from hardpoint.errors import ConfigError

NO_TABLES = "there are no n-gram tables"
NO_COMPILE = "models are compiled for any size, by torch.compile as it is"


class Limit(NamedTuple):
    """A field and the only values it may have."""

    path: str
    allowed: tuple[Any, ...]
    why: str


# fmt: off
LIMITS = (
    Limit("compilation_config.compile_sizes",              (None, []),                   NO_COMPILE),
    Limit("compilation_config.inductor_passes",            ({},),                        NO_COMPILE),
    Limit("compilation_config.compile_mm_encoder",         (False,),                     NO_MEDIA),
    Limit("compilation_config.cudagraph_mm_encoder",       (False,),                     NO_MEDIA),
    Limit("speculative_config",                            (None,),                      NO_SPEC),
    Limit("kv_transfer_config",                            (None,),                      NO_TRANSFER),
    Limit("kv_events_config",                              (None,),                      LATER),
    Limit("ec_transfer_config",                            (None,),                      NO_MEDIA),
    Limit("watermark_config",                              (None,),                      LATER),
    Limit("diffusion_config",                              (None,),                      LATER),
    Limit("engram_config",                                 (None,),                      NO_TABLES),
    Limit("weight_transfer_config",                        (None,),                      LATER),
    Limit("reasoning_config",                              (None,),                      NO_BUDGET),
    Limit("parallel_config.placement_group",               (None,),                      NO_RANKS),
    Limit("parallel_config.ray_runtime_env",               (None,),                      NO_RANKS),
)
# fmt: on


_OWN_FLAG = {flag.field for flag in FLAGS if flag.field}


def check_supported(config: VllmConfig) -> None:
    """Raise `ConfigError` naming the first field whose value this version cannot honour."""
    for limit in LIMITS:
        value = _read(config, limit.path)
        if not any(_equal(value, allowed) for allowed in limit.allowed):
            check_connector(limit.path, value)
            raise _refused(limit.path, value, limit.why)
    for flag in FLAGS:
        if flag.why and flag.field:
            _check_flag(config, flag)


def _check_flag(config: VllmConfig, flag: Flag) -> None:
    parent, _, name = flag.field.rpartition(".")
    section = _read(config, parent) if parent else config
    if section is None:
        return
    value, default = getattr(section, name), type(section).__dataclass_fields__[name].default
    if isinstance(value, Section):
        _check_section(flag, value)
    elif not flag.allows(value) and not _equal(value, default):
        raise _refused(flag.field, value, reason(flag))


def _check_section(flag: Flag, section: Section) -> None:
    """A section whose flag is refused: every field must be at its default, unless it has a flag of its own."""
    fresh = type(section)()
    for name, value in vars(section).items():
        path = f"{flag.field}.{name}"
        if not name.startswith("_") and path not in _OWN_FLAG and value != getattr(fresh, name):
            raise _refused(path, value, reason(flag))


def _read(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _equal(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)


def _refused(path: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{path} is {value!r}: {why}", code="config-unsupported", fix="leave it at its default")
