"""How the built-in platforms choose an attention backend: the user's, or the first that has no reason against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.contracts.platform import Platform
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry


def choose_attention(platform: type[Platform], selected: Any, facts: Any, ours: Sequence[str]) -> str:
    """Dotted path of the backend class for a layer.

    selected  what the user named, a member or a name; None = choose among `ours`, best first
    facts     an AttentionSelectorConfig
    Raises ConfigError (a ValueError) with the backend's reasons when the named one cannot compute the layer,
    or with those of all of `ours`.
    """
    if selected is not None:
        name = str(getattr(selected, "name", selected))
        reasons = _reasons(platform, name, facts)
        if reasons:
            raise ConfigError(
                f"the attention backend {name} cannot be used on {platform.device_name}: {'; '.join(reasons)}",
                code="config-attention-backend",
                fix="leave --attention-backend out, or name another one",
            )
        return _path(name)
    found = {}
    for name in ours:
        found[name] = _reasons(platform, name, facts)
        if not found[name]:
            return _path(name)
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in found.items())
    raise ConfigError(
        f"no attention backend on {platform.device_name} can compute a layer of this model ({why})",
        code="config-attention-backend",
        fix="use another --dtype or --kv-cache-dtype, or a plugin's backend with --attention-backend",
    )


def _path(name: str) -> str:
    return registry("attention_backends").entry(name).target.replace(":", ".")


def _reasons(platform: type[Platform], name: str, facts: Any) -> list[str]:
    backend = registry("attention_backends").load(name)
    return backend.validate_configuration(**facts._asdict(), device_capability=platform.get_device_capability())
