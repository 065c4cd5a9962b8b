"""The platform of this process: `from hardpoint.platforms import current_platform`.

It is chosen at the first use. `set_current_platform` replaces it; assigning to the module's
attribute works too, as plugins for vLLM do.
"""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.platform import CpuArchEnum, DeviceCapability, Platform, PlatformEnum
from hardpoint.extensions.builtins import BUILTIN_PLATFORMS
from hardpoint.extensions.platform_choice import resolve_platform_cls_qualname
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname

_chosen: dict[int, Platform] = {}
_with_kernels: set[type[Platform]] = set()


def __getattr__(name: str) -> Any:
    if name == "current_platform":
        return _current()
    raise AttributeError(f"module 'hardpoint.platforms' has no attribute {name!r}")


def _current() -> Platform:
    # A forked child keeps its parent's choice: a second look at the driver could only break it.
    found = _chosen.get(0)
    if found is None:
        detectors = {key: load_ref(ref) for key, ref in BUILTIN_PLATFORMS.items()}
        found = _chosen[0] = _instance(resolve_obj_by_qualname(resolve_platform_cls_qualname(detectors)))
    return found


def _instance(cls: Any) -> Platform:
    if not (isinstance(cls, type) and issubclass(cls, Platform)):
        raise TypeError(f"{cls!r} is not a subclass of hardpoint.contracts.platform.Platform")
    return cls()


def set_current_platform(platform: Platform | type[Platform]) -> None:
    """Make `platform` the current one of this process, in place of what detection says."""
    _chosen[0] = platform() if isinstance(platform, type) else platform


def import_kernels() -> None:
    """Let the current platform import its kernels, unless it has in this process."""
    platform = _current()
    if type(platform) not in _with_kernels:
        platform.import_kernels()
        _with_kernels.add(type(platform))


def reset_current_platform() -> None:
    """Forget the choice, so that the next use detects again (tests)."""
    _chosen.clear()


__all__ = [
    "CpuArchEnum",
    "DeviceCapability",
    "Platform",
    "PlatformEnum",
    "import_kernels",
    "reset_current_platform",
    "set_current_platform",
]
