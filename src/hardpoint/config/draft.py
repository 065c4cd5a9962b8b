"""A configuration while it is made: who writes what, and what happens to writes after it is sealed.

A `Draft` is attached to every section. Each write goes to the ledger with its step and author.
After `seal` a write by other code than ours still works, since plugins for vLLM make such writes, and
is logged with its author and a warning.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hardpoint.config.sections import Section, VllmConfig
from hardpoint.extensions.ledger import BUILT_IN, Origin, acting_plugin, current_origin, ledger
from hardpoint.log import init_logger

logger = init_logger(__name__)

_LONGEST = 200
_OURS = "hardpoint."


class Draft:
    """The journal of one configuration."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        self.step = ""
        self.sealed = False
        # Whether another process has a copy already.
        self.sent = False
        # What changed in which step: (field path, step).
        self.writes: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        self.attach()

    def attach(self) -> None:
        """Watch every section, also those added since the last call."""
        self._names = {id(section): path for path, section in _walk(self.config)}
        for _, section in _walk(self.config):
            section.__dict__["_journal"] = self

    @contextmanager
    def attributing(self, step: str, author: Origin | None = None) -> Iterator[None]:
        """Attribute the writes inside the block to `step`, also those into lists and dicts.

        author  whose code the step calls; writes into a list or dict do not show who makes them
        """
        before = _containers(self.config)
        self.step = step
        try:
            yield
        finally:
            self.attach()
            for path, value in _containers(self.config).items():
                if path in before and value != before[path]:
                    self._note(path, before[path], value, author or BUILT_IN)
            self.step = ""

    def seal(self) -> None:
        """Declare the configuration finished."""
        self.attach()
        self.sealed = True

    @contextmanager
    def unsealed(self, why: str) -> Iterator[None]:
        """Let our own code write inside the block; `why` goes to the ledger as the step."""
        self.sealed, self.step = False, why
        try:
            yield
        finally:
            self.attach()
            self.sealed, self.step = True, ""

    def wrote(self, section: Section, name: str, old: Any, new: Any) -> None:
        """Note a write; called by the section before it happens."""
        if old is new or _same(old, new):
            return
        path = f"{self._names.get(id(section), type(section).__name__)}.{name}".lstrip(".")
        if not self.step and _is_runtime(section, name):
            return
        if isinstance(new, (list, dict, set)) and not self.sealed:
            # The comparison at the end of the step reports it, once.
            return
        writer = _writer()
        author = _author(writer)
        self._note(path, old, new, author)
        # Our own code notes results of the start, such as the block size an attention backend needs.
        if self.sealed and not writer.startswith(_OURS):
            text = f"{path} is set to {_short(new)} after the configuration was sealed, by {author.label}"
            ledger.record("warn", "config", path, origin=author, detail=text)
            seen = "other processes do not see it" if self.sent else "what was derived from the old value stays"
            logger.warning("%s; %s", text, seen)

    def _note(self, path: str, old: Any, new: Any, author: Origin) -> None:
        step = self.step or ("after sealing" if self.sealed else "outside the steps")
        self.writes.append((path, step))
        detail = f"{_short(old)} -> {_short(new)} in step {step!r}"
        ledger.record("config_write", "config", path, origin=author, detail=detail)


def draft_of(config: VllmConfig) -> Draft | None:
    """Return the draft attached to a configuration."""
    return config.__dict__.get("_journal")


@contextmanager
def writing(config: VllmConfig, why: str) -> Iterator[None]:
    """Write to a configuration that may be sealed: for the engine's own later results."""
    draft = draft_of(config)
    if draft is None or not draft.sealed:
        yield
        return
    with draft.unsealed(why):
        yield


def _walk(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    yield path, section
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = section.__dict__.get(field.name)
        if isinstance(value, Section):
            yield from _walk(value, f"{path}.{field.name}".lstrip("."))


def _containers(config: VllmConfig) -> dict[str, Any]:
    """Copies of the lists, dicts and sets in the configuration, by path."""
    found: dict[str, Any] = {}
    for path, section in _walk(config):
        for field in dataclasses.fields(section):  # type: ignore[arg-type]
            value = section.__dict__.get(field.name)
            if isinstance(value, (list, dict, set)) and not _is_runtime(section, field.name):
                found[f"{path}.{field.name}".lstrip(".")] = value.copy()
    return found


def _writer() -> str:
    """The module that assigns to the field: past `wrote` and `Section.__setattr__`."""
    return str(sys._getframe(3).f_globals.get("__name__", ""))


def _author(writer: str) -> Origin:
    """Who writes: whoever's module assigns, not whoever's patch lies further out on the stack."""
    if writer.startswith(_OURS):
        return BUILT_IN
    return ledger.origin_of_module(writer) or acting_plugin() or current_origin()


def _is_runtime(section: Section, name: str) -> bool:
    """Whether the field is a result that the running engine fills in."""
    field = type(section).__dataclass_fields__.get(name)  # type: ignore[attr-defined]
    return name.startswith("_") or (field is not None and not field.init)


def _same(old: Any, new: Any) -> bool:
    try:
        if bool(old == new) and type(old) is type(new):
            return True
    except Exception:  # a plugin's value may not compare
        return False
    # A worker turns the name of a number format into torch's object.
    return isinstance(old, str) and type(new).__name__ == "dtype" and str(new).removeprefix("torch.") == old


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
