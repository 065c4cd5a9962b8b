"""Whether a reference can be loaded, as far as that shows without importing anything.

An import may take seconds and have effects that belong into another process. Where a module lies can be asked
without it, and a name that its text does not have is not in it, unless the module makes names as it goes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

_LONGEST_SOURCE = 4 << 20
# What a module may define names with that its text does not show.
_MAKES_NAMES = re.compile(r"__getattr__|import \*|\bglobals\(|\bvars\(|\bsetattr\(|\bexec\(|__dict__|sys\.modules")


def why_not_found(ref: str) -> str | None:
    """Why "module:Name.Nested" cannot be loaded; None when nothing speaks against it."""
    module_name, _, names = ref.partition(":")
    name = names.partition(".")[0]
    module = sys.modules.get(module_name)
    if module is not None:
        return None if hasattr(module, name) else f"{module_name!r} has no attribute {name!r}"
    spec, missing = _locate(module_name)
    if missing:
        return missing
    source = _source_of(spec)
    if source is None or _MAKES_NAMES.search(source) or re.search(rf"\b{re.escape(name)}\b", source):
        return None
    return f"{module_name!r} has no attribute {name!r}"


def _locate(module_name: str) -> tuple[ModuleSpec | None, str]:
    """(Where a module is, or why it is nowhere). Neither, where that cannot be told."""
    spec, places, found = None, None, ""
    for part in module_name.split("."):
        if found and places is None:
            return None, f"there is no module {f'{found}.{part}'!r}: {found!r} is not a package"
        found = f"{found}.{part}".lstrip(".")
        try:
            spec, places = _find(found, places)
        except Exception:  # A finder of somebody else's, or a place it cannot read.
            return None, ""
        if spec is None:
            return None, f"there is no module {found!r}"
    return spec, ""


def _find(name: str, places: Sequence[str] | None) -> tuple[ModuleSpec | None, Sequence[str] | None]:
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__spec__ is not None:
        return loaded.__spec__, getattr(loaded, "__path__", None)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec, spec.submodule_search_locations
    return None, None


def _source_of(spec: ModuleSpec | None) -> str | None:
    """The text of a module that is Python source, else None."""
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    path = Path(str(spec.origin))
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LONGEST_SOURCE else None
    except (OSError, UnicodeDecodeError):
        return None
