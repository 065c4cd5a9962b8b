"""The configuration as bytes: a tree of plain values, in which sections, facts and classes are tagged.

A class crosses as its reference string. Nothing is pickled. Only section classes of
`hardpoint.config.sections` are rebuilt; a tag that names anything else is an error.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from hardpoint import __version__
from hardpoint.config import sections
from hardpoint.config.hf_config import HFConfig, text_part
from hardpoint.config.sections import Section, VllmConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref, ref_of

_TAG = "\u0000"
_PLAIN = (type(None), bool, int, float, str, bytes)
# Set while a model runs or built anew by each process, so they stay where they are.
_LOCAL = {"static_forward_context", "quant_config", "enabled_custom_ops", "disabled_custom_ops"}
_ENUMS: dict[str, type[enum.Enum]] = {
    kind.__name__: kind for kind in (sections.CompilationMode, sections.CUDAGraphMode, sections.OptimizationLevel)
}
_SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, kind in vars(sections).items()
    if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section
}


def to_wire(vllm_config: VllmConfig) -> bytes:
    """Encode a configuration. `ConfigError` names a value that cannot cross processes."""
    journal = vllm_config.__dict__.get("_journal")
    if journal is not None:
        journal.sent = True
    return msgspec.msgpack.encode(_encode(vllm_config, "vllm_config"))


def from_wire(data: bytes) -> VllmConfig:
    """Rebuild what `to_wire` encoded, as it was: nothing is resolved or checked again."""
    config = _decode(msgspec.msgpack.decode(data))
    if not isinstance(config, VllmConfig):
        raise ConfigError("these bytes are not a configuration", code="config-wire")
    return config


def digest(vllm_config: VllmConfig, include_version: bool = True) -> str:
    """Return a short digest that is equal for engines configured alike, whatever their instance id."""
    tree = _encode(vllm_config, "vllm_config")
    tree[_TAG + "fields"].pop("instance_id")
    salt = __version__ if include_version else ""
    return hashlib.sha256(salt.encode() + msgspec.msgpack.encode(tree, order="deterministic")).hexdigest()[:16]


def check_plain(value: Any, where: str) -> None:
    """Raise `ConfigError` unless `value` can cross processes."""
    _encode(value, where)


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, enum.Enum):
        if type(value).__name__ in _ENUMS:
            return {_TAG + "enum": type(value).__name__, _TAG + "name": value.name}
        return _encode(value.value, where)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Section):
        return _encode_section(value, where)
    if isinstance(value, HFConfig):
        return {_TAG + "hf": _encode(value.to_dict(), where)}
    if isinstance(value, dict):
        return {_key(key, where): _encode(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return _encode_other(value, where)


def _encode_section(value: Section, where: str) -> dict[str, Any]:
    name = type(value).__name__
    if _SECTIONS.get(name) is not type(value):
        raise ConfigError(
            f"{where} is a {type(value).__qualname__}, which other processes do not know",
            code="config-wire",
            fix="put a plugin's own settings into additional_config or --plugin-config",
        )
    fields = {
        field.name: _encode(getattr(value, field.name), f"{where}.{field.name}")
        for field in dataclasses.fields(value)  # type: ignore[arg-type]
        if field.name not in _LOCAL
    }
    return {_TAG + "section": name, _TAG + "fields": fields}


def _encode_other(value: Any, where: str) -> Any:
    if isinstance(value, (tuple, set, frozenset)):
        kind = "tuple" if isinstance(value, tuple) else "set"
        items = value if isinstance(value, tuple) else sorted(value, key=str)
        return {_TAG + kind: [_encode(item, where) for item in items]}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type) or callable(value):
        return {_TAG + "ref": _reference(value, where)}
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which cannot be sent to another process",
        code="config-wire",
        fix="use numbers, strings, lists, dicts, or a class that can be imported by name",
    )


def _reference(value: Any, where: str) -> str:
    try:
        return ref_of(value)
    except ConfigError as problem:
        raise ConfigError(f"{where}: {problem.what}", code="config-wire", fix=problem.fix) from None


def _key(key: Any, where: str) -> Any:
    if (isinstance(key, str) and key.startswith(_TAG)) or not isinstance(key, (str, int)):
        raise ConfigError(f"{where} has the key {key!r}, which cannot be sent to another process", code="config-wire")
    return key


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG + "section" in value:
        return _decode_section(value[_TAG + "section"], value[_TAG + "fields"])
    if _TAG + "enum" in value:
        return _ENUMS[value[_TAG + "enum"]][value[_TAG + "name"]]
    if _TAG + "hf" in value:
        return HFConfig(_decode(value[_TAG + "hf"]))
    if _TAG + "ref" in value:
        return load_ref(value[_TAG + "ref"])
    if _TAG + "tuple" in value:
        return tuple(_decode(value[_TAG + "tuple"]))
    if _TAG + "set" in value:
        return set(_decode(value[_TAG + "set"]))
    return {key: _decode(item) for key, item in value.items()}


def _decode_section(name: str, fields: dict[str, Any]) -> Section:
    kind = _SECTIONS.get(name)
    if kind is None:
        raise ConfigError(f"there is no configuration section {name!r}", code="config-wire")
    section = object.__new__(kind)
    section.__dict__.update({key: _decode(item) for key, item in fields.items()})
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in _LOCAL:
            section.__dict__[field.name] = _fresh(field)
    if isinstance(section, sections.ModelConfig):
        section.hf_text_config = text_part(section.hf_config)
    return section


def _fresh(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
