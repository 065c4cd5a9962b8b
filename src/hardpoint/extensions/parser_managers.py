"""The parsers by name, under vLLM's interface. Registering imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, ClassVar, TypeVar

from hardpoint.extensions.parser_files import import_parser_file
from hardpoint.extensions.refs import load_ref, parse_ref
from hardpoint.extensions.registry import Registry, registry

ClassT = TypeVar("ClassT", bound=type)


class LazyParsers(MutableMapping[str, tuple[str, str]]):
    """The entries that are not imported yet, name to (module, class); writes register, deletions unregister."""

    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def _entries(self) -> dict[str, tuple[str, str]]:
        return {entry.name: parse_ref(entry.ref) for entry in registry(self._key).entries() if not entry.is_loaded}

    def __getitem__(self, name: str) -> tuple[str, str]:
        return self._entries[name]

    def __setitem__(self, name: str, value: tuple[str, str]) -> None:
        registry(self._key).put(name, ":".join(value))

    def __delitem__(self, name: str) -> None:
        if name not in self._entries:
            raise KeyError(name)
        registry(self._key).unregister(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Views(type):
    """Answers for the dictionaries that plugins read and write on a manager."""

    key: str

    @property
    def lazy_parsers(cls) -> LazyParsers:
        """The entries that are not imported yet."""
        return LazyParsers(cls.key)

    @property
    def _all(cls) -> MutableMapping[str, Any]:
        return registry(cls.key).mapping()


class _ParserManager(metaclass=_Views):
    key: ClassVar[str]
    base: ClassVar[str]

    @classmethod
    def _registry(cls) -> Registry:
        # A class can only be checked against a contract that is imported.
        load_ref(cls.base)
        return registry(cls.key)

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: type | None = None
    ) -> Any:
        """Register a parser class under one name or several, as a call or as a class decorator.

        name   None = the class's name
        force  False: KeyError for a name that is taken; True replaces

        Raises TypeError for a class that does not derive from the contract and for arguments of a wrong kind.
        """
        if not isinstance(force, bool):
            raise TypeError(f"force must be a bool, not {type(force).__name__}")
        if not (name is None or isinstance(name, str) or _are_names(name)):
            raise TypeError(f"name must be None, a str or a list of str, not {name!r}")
        if module is not None:
            cls._register(module, name, force)
            return module

        def decorate(found: ClassT) -> ClassT:
            cls._register(found, name, force)
            return found

        return decorate

    @classmethod
    def _register(cls, found: type, name: str | list[str] | None, force: bool) -> None:
        names = [name] if isinstance(name, str) else name or [getattr(found, "__name__", str(found))]
        for one in names:
            cls._registry().register(one, found, strict=not force)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a parser by where it is; it is imported when it is chosen."""
        registry(cls.key).register(name, f"{module_path}:{class_name}")

    @classmethod
    def list_registered(cls) -> list[str]:
        """All names, sorted."""
        return sorted(registry(cls.key).names())

    @classmethod
    def _load(cls, name: str) -> type[Any]:
        return cls._registry().load(name)


def _are_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and bool(names) and all(isinstance(name, str) for name in names)


class _ToolViews(_Views):
    @property
    def tool_parsers(cls) -> MutableMapping[str, Any]:
        """All entries by name: reading imports, writing registers, deleting unregisters."""
        return cls._all


class ToolParserManager(_ParserManager, metaclass=_ToolViews):
    """The tool parsers of this process."""

    key = "tool_parsers"
    base = "hardpoint.contracts.tool_parser:ToolParser"

    @classmethod
    def get_tool_parser(cls, name: str | None) -> type[Any]:
        """The class registered under a name.

        Raises KeyError with the nearest names when there is none, what importing it raises, and TypeError when it
        is no ToolParser.
        """
        return cls._load(str(name))

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        """Import a module or a `.py` file that registers parsers; PluginError with the reason when that fails."""
        import_parser_file(plugin_path, "tool_parsers")


class _ReasoningViews(_Views):
    @property
    def reasoning_parsers(cls) -> MutableMapping[str, Any]:
        """All entries by name: reading imports, writing registers, deleting unregisters."""
        return cls._all


class ReasoningParserManager(_ParserManager, metaclass=_ReasoningViews):
    """The reasoning parsers of this process."""

    key = "reasoning_parsers"
    base = "hardpoint.contracts.reasoning_parser:ReasoningParser"

    @classmethod
    def get_reasoning_parser(cls, name: str | None) -> type[Any]:
        """The class registered under a name; errors as `get_tool_parser`."""
        return cls._load(str(name))

    @classmethod
    def import_reasoning_parser(cls, plugin_path: str) -> None:
        """Import a module or a `.py` file that registers parsers; PluginError with the reason when that fails."""
        import_parser_file(plugin_path, "reasoning_parsers")
