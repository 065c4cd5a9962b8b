"""The files that code comes from: found without importing it, and a digest of what is in them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

# Their files change with their versions only, or with those of Python.
_SETTLED = frozenset({"torch", *sys.stdlib_module_names})
_OURS = "hardpoint"


def files_of(module_name: str) -> list[Path]:
    """The file of a module that need not be imported yet; for a package all .py files below it.

    Neither the module nor its parents are imported. Empty when there are no files to be found, as in a zip.
    """
    try:
        spec = _spec_of(module_name)
        if spec is None:
            return []
        found = {Path(spec.origin)} if spec.has_location and spec.origin else set()
        for folder in spec.submodule_search_locations or ():
            found |= set(Path(folder).rglob("*.py"))
        return sorted(file for file in found if file.is_file())
    except Exception:  # whatever a finder of somebody else's raises: no files are known, which costs time only
        return []


def _spec_of(module_name: str) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(module_name), "__spec__", None)
    if loaded is not None:
        return loaded
    parts = module_name.split(".")
    spec, folders = None, None
    for count in range(1, len(parts) + 1):
        spec = _ask_finders(".".join(parts[:count]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _ask_finders(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    # `importlib.util.find_spec` would import the parents.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, folders) if find is not None else None
        if spec is not None:
            return spec
    return None


def files_behind(cls: type) -> list[Path]:
    """The files that an imported class depends on, but for the standard library's and torch's.

    Those of its bases, and every loaded module of the packages that these belong to.
    """
    modules = {base.__module__ for base in cls.__mro__}
    roots = {name.partition(".")[0] for name in modules} - _SETTLED - {_OURS}
    loaded = {name for name in list(sys.modules) if name.partition(".")[0] in roots}
    ours = {name for name in modules if name.partition(".")[0] == _OURS}
    files = (getattr(sys.modules.get(name), "__file__", None) for name in loaded | ours)
    return sorted({Path(file) for file in files if file and Path(file).is_file()})


def digest(path: Path) -> str:
    """A digest of a file's content; empty when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def digests(paths: Iterable[Path]) -> dict[str, str]:
    """Path to digest."""
    return {str(path): digest(path) for path in paths}
