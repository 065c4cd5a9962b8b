"""Who replaces what in our modules and classes, so that a patch is never silent and two of them on one place are told.

The alias tells of each name that is written through it and of each class it hands out; those classes are looked
at again after every plugin, and before the ledger leaves the process.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from hardpoint.extensions.ledger import Origin, current_origin, ledger
from hardpoint.log import init_logger

logger = init_logger("hardpoint.extensions")

KEY = "patches"  # in the ledger, beside the keys of the table
_OURS = "hardpoint."
# What the machinery of classes writes by itself.
_IGNORED = frozenset({"_abc_impl", "__abstractmethods__", "__annotations__", "__doc__", "__parameters__"})
_ABSENT: Any = object()


class Patches:
    """What is patched in this process, and by whom."""

    def __init__(self) -> None:
        self._seen: dict[type, dict[str, Any]] = {}
        self._first: dict[str, Any] = {}
        self._authors: dict[str, list[Origin]] = {}

    def watch(self, value: Any) -> None:
        """Remember how a class of ours looks; it has just been handed to somebody who may change it."""
        if isinstance(value, type) and value not in self._seen and value.__module__.startswith(_OURS):
            self._seen[value] = dict(vars(value))

    def look(self, origin: Origin | None = None) -> None:
        """Record what has changed in the watched classes since the last look.

        origin  who was running; a function tells by its module who made it
        """
        for cls, before in self._seen.items():
            now = vars(cls)
            changed = [name for name in {**before, **now} if before.get(name, _ABSENT) is not now.get(name, _ABSENT)]
            if not changed:
                continue
            for name in changed:
                if name not in _IGNORED:
                    path = f"{cls.__module__}.{cls.__qualname__}.{name}"
                    self._note(path, before.get(name, _ABSENT), now.get(name, _ABSENT), origin)
            self._seen[cls] = dict(now)

    def wrote(self, module: str, name: str, before: Any, after: Any) -> None:
        """A name of one of our modules is set, or deleted, through the alias."""
        self._note(f"{module}.{name}", before, after, current_origin())

    def clear(self) -> None:
        """Forget everything (tests)."""
        self._seen.clear()
        self._first.clear()
        self._authors.clear()

    def _note(self, path: str, before: Any, after: Any, origin: Origin | None) -> None:
        if before is after:
            return
        if self._first.setdefault(path, before) is after:
            # Put back as it was: as if nobody had been there.
            self._authors.pop(path, None)
            return
        author = _maker(after) or origin or current_origin()
        ledger.record("override", KEY, path, origin=author, detail=f"{path} is now {_shown(after)}")
        others = [one for one in self._authors.get(path, []) if one.distribution != author.distribution]
        self._authors.setdefault(path, []).append(author)
        if others:
            earlier = " and ".join(dict.fromkeys(one.label for one in others))
            what = f"{path} is patched by two plugins: first by {earlier}, then by {author.label}, which is in force"
            fix = "leave one of the two out, unless the later one calls what it found"
            ledger.record("warn", KEY, path, origin=author, detail=what, fix=fix)
            logger.warning("%s. Fix: %s", what, fix)


def _maker(value: Any) -> Origin | None:
    return ledger.origin_of_module(_made_in(value)[0])


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "gone"
    module, name = _made_in(value)
    return f"{module}.{name}" if name else repr(value)[:80]


def _made_in(value: Any) -> tuple[str, str]:
    """The module and qualified name of the code that a name stands for now."""
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        # A wrapper made with functools.wraps claims to be what it wraps; its code does not.
        return str(value.__globals__.get("__name__", "")), value.__code__.co_qualname
    return str(getattr(value, "__module__", None) or ""), getattr(value, "__qualname__", None) or ""


patches = Patches()
ledger.before_export = patches.look
