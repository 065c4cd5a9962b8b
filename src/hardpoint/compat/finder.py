"""The import hook behind `import vllm...`: modules that read from, and write to, our own.

An alias module holds nothing. Reading a name finds its owner through `table`; writing or
deleting one does so on the owner, so that a plugin which patches `vllm.x.y.name` patches
the code we really run. A name that the table does not have is an error that says so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import opcode
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.compat.rows import Entry
from hardpoint.extensions.patches import patches

ROOT = "vllm"
_DOCS = "docs/compatibility.md lists what the alias provides"
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


@cache
def _table() -> Any:
    """The table, once something of `vllm` is asked for: every process installs the finder, few need it."""
    return importlib.import_module("hardpoint.compat.table")


class AliasModule(ModuleType):
    """One `vllm...` module as seen by plugins."""

    def __init__(self, name: str, row: Entry) -> None:
        super().__init__(name, f"{name}, answered by Hardpoint; {_DOCS}.")
        vars(self)["_row"] = row

    def __getattr__(self, name: str) -> Any:
        row: Entry = vars(self)["_row"]
        owner, attribute = row.locate(name)
        if owner is None:
            return self._missing(name, attribute)
        try:
            found = getattr(importlib.import_module(owner), attribute) if attribute else importlib.import_module(owner)
        except AttributeError:
            return self._missing(name, "")
        patches.watch(found)
        return found

    def _missing(self, name: str, reason: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name not in ("__path__", "__all__", "__wrapped__") and full in _table().known():
            return importlib.import_module(full)
        message = _explain(full, reason)
        # `from vllm.x import y` turns an AttributeError into a text of its own, losing ours.
        if _is_import_from(sys._getframe(2)):
            raise ImportError(message, name=self.__name__)
        raise AttributeError(message)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or f"{self.__name__}.{name}" in _table().known():
            super().__setattr__(name, value)
            return
        owner, attribute = vars(self)["_row"].locate(name)
        if owner is None or not attribute:
            # A name of the plugin's own, or one we do not have: keep it for whoever reads it here.
            super().__setattr__(name, value)
            return
        module = importlib.import_module(owner)
        before = vars(module).get(attribute)
        setattr(module, attribute, value)
        patches.wrote(owner, attribute, before, value)

    def __delattr__(self, name: str) -> None:
        owner, attribute = vars(self)["_row"].locate(name)
        if name in vars(self) or owner is None or not attribute:
            super().__delattr__(name)
            return
        module = importlib.import_module(owner)
        before = vars(module).get(attribute)
        delattr(module, attribute)
        patches.wrote(owner, attribute, before, None)

    def __dir__(self) -> list[str]:
        return sorted(
            {
                *vars(self)["_row"].public_names(),
                *(name.rpartition(".")[2] for name in _table().submodules(self.__name__)),
            }
        )

    @property
    def __all__(self) -> list[str]:
        return [name for name in vars(self)["_row"].public_names() if not name.startswith("_")]


def _is_import_from(frame: Any) -> bool:
    code: CodeType = frame.f_code
    return 0 <= frame.f_lasti < len(code.co_code) and code.co_code[frame.f_lasti] == _IMPORT_FROM


def _explain(full: str, reason: str) -> str:
    if reason:
        return f"{full} is not available in Hardpoint yet: it waits for {reason} ({_DOCS})"
    return f"{full} is not part of Hardpoint's vllm alias ({_DOCS})"


class _Loader(importlib.abc.Loader):
    def __init__(self, row: Entry) -> None:
        self._row = row

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AliasModule(spec.name, self._row)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up when asked for."""


class AliasFinder(importlib.abc.MetaPathFinder):
    """Answers for `vllm` and everything below it, and for the metadata of a distribution `vllm`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the alias module's spec; refuse by name what `vllm` has and we do not."""
        if fullname != ROOT and not fullname.startswith(ROOT + "."):
            return None
        row = _table().entry(fullname)
        if isinstance(row, _table().Entry):
            spec = importlib.machinery.ModuleSpec(fullname, _Loader(row), is_package=True)
            spec.submodule_search_locations = []
            return spec
        # find_spec() as a question is answered None; an import statement deserves the reason.
        if sys._getframe(1).f_code.co_name == "_find_spec" and sys._getframe(2).f_code.co_name != "find_spec":
            raise ModuleNotFoundError(_explain(fullname, getattr(row, "what", "")), name=fullname)
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        """Answer `importlib.metadata.version("vllm")` with the API level we implement."""
        name = getattr(context, "name", None)
        if name is None or name.lower() == ROOT:
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {_table().API_VERSION}\n"
        # No entry points: what we ship in vLLM's groups are built-in rows of our table.
        return None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError("the vllm alias has no files")


_FINDER = AliasFinder()


def install() -> bool:
    """Answer `import vllm` in this process from now on; False where a real vLLM is already imported."""
    if _FINDER in sys.meta_path:
        return True
    if ROOT in sys.modules and not isinstance(sys.modules[ROOT], AliasModule):
        if not getattr(sys.modules[ROOT], "__hardpoint_alias__", False):
            return False
        del sys.modules[ROOT]
    sys.meta_path.insert(0, _FINDER)
    return True


def uninstall() -> None:
    """Take the alias out of this process again."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    for name in [name for name, module in sys.modules.items() if isinstance(module, AliasModule)]:
        del sys.modules[name]
