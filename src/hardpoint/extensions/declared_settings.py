"""What a plugin declares about its settings: a class, flags, and how given values become an object of the class."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import RegistrationError
from hardpoint.extensions.ledger import Origin
from hardpoint.extensions.setting_words import NAME, PluginConfigError
from hardpoint.extensions.typed_values import (
    Text,
    ValueProblem,
    build,
    check_fields,
    convert,
    field_kinds,
    guess,
    in_words,
    unknown,
)

_FLAG = re.compile(r"--[a-z][a-z0-9-]*")


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """A flag of `serve` that a plugin declared for one of its settings."""

    plugin: str
    field: str
    flag: str
    kind: Any
    help: str
    default: Any
    origin: Origin

    @property
    def dest(self) -> str:
        """Where a parser keeps the value."""
        return f"plugin_setting {self.plugin}.{self.field}"

    def check(self, text: str) -> None:
        """Raise ValueProblem for text that is not a value of the setting."""
        convert(Text(text), self.kind)

    def word(self, value: Any) -> str:
        """The value as `--plugin-config` takes it."""
        return f"{self.plugin}.{self.field}={json.dumps(value) if isinstance(value, bool) else value}"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a plugin said about its settings: a dataclass or pydantic model, and flags by field."""

    name: str
    kind: Any
    flags: Mapping[str, str]
    origin: Origin

    @property
    def is_dataclass(self) -> bool:
        """Whether we convert the values; a pydantic model does that itself."""
        return dataclasses.is_dataclass(self.kind)

    def is_of(self, kind: Any) -> bool:
        """Whether the settings are of this class, or of one loaded again from the same place."""
        return (self.kind.__module__, self.kind.__qualname__) == (kind.__module__, kind.__qualname__)

    def kinds(self) -> dict[str, Any]:
        """Field to type."""
        if self.is_dataclass:
            return field_kinds(self.kind)
        return {name: found.annotation for name, found in self.kind.model_fields.items()}

    def setting_flags(self) -> list[SettingFlag]:
        """The declared flags with what a parser needs."""
        kinds = self.kinds()
        return [
            SettingFlag(self.name, name, flag, kinds[name], *self._about(name), self.origin)
            for name, flag in self.flags.items()
        ]

    def _about(self, name: str) -> tuple[str, Any]:
        """(help, default or None) of a field."""
        if not self.is_dataclass:
            found = self.kind.model_fields[name]
            return found.description or "", None if found.is_required() else found.default
        found = self.kind.__dataclass_fields__[name]
        default = None if found.default is dataclasses.MISSING else found.default
        return str(found.metadata.get("help", "")), default


def make_declaration(name: str, kind: Any, flags: bool | Mapping[str, str], origin: Origin) -> Declaration:
    """Check what a plugin declares. Raises RegistrationError naming it."""
    return Declaration(name, kind, _checked_flags(name, kind, flags, origin), origin)


def _checked_flags(name: str, kind: Any, flags: bool | Mapping[str, str], origin: Origin) -> dict[str, str]:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise refused(f"{name!r} cannot be the name of a plugin's settings: use letters, digits, - and _", origin)
    if not (isinstance(kind, type) and (dataclasses.is_dataclass(kind) or _is_pydantic(kind))):
        raise refused(f"the settings of {name!r} are {kind!r}, neither a dataclass nor a pydantic model", origin)
    fields = list(field_kinds(kind)) if dataclasses.is_dataclass(kind) else list(kind.model_fields)  # type: ignore[attr-defined]
    if flags is True:
        flags = {one: f"--{name}-{one}".replace("_", "-").lower() for one in fields}
    for one, flag in dict(flags or {}).items():
        if one not in fields:
            raise refused(f"the flag {flag} of {name!r} is for the field {one!r}, which {unknown(one, fields)}", origin)
        if not _FLAG.fullmatch(flag):
            raise refused(f"{flag!r} is not a flag: write it as --{name}-{one}", origin)
    return dict(flags or {})


def _is_pydantic(kind: type) -> bool:
    return callable(getattr(kind, "model_validate", None)) and isinstance(getattr(kind, "model_fields", None), dict)


def refused(what: str, origin: Origin) -> RegistrationError:
    """The error for a declaration that cannot be."""
    return RegistrationError(what, code="plugin-config", origin=origin.label, fix="change the call of declare()")


def make_object(declaration: Declaration, values: dict[str, Any]) -> Any:
    """The declared class with the given values. Raises PluginConfigError with every problem there is."""
    if not declaration.is_dataclass:
        return _make_pydantic(declaration, values)
    found, problems = check_fields(values, declaration.kind)
    if not problems:
        try:
            return build(declaration.kind, found)
        except ValueProblem as problem:
            problems = [problem]
    raise _error(declaration, [(problem.path, problem.what) for problem in problems])


def _make_pydantic(declaration: Declaration, values: dict[str, Any]) -> Any:
    kind = declaration.kind
    known = {name for key, found in kind.model_fields.items() for name in (key, found.alias) if name}
    if kind.model_config.get("extra") != "allow":
        problems = [(key, unknown(key, kind.model_fields)) for key in values if key not in known]
        if problems:
            raise _error(declaration, problems)
    kinds = declaration.kinds()
    given = {key: _for_pydantic(value, kinds.get(key, Any)) for key, value in values.items()}
    try:
        return kind.model_validate(given)
    except ValueError as error:
        details = getattr(error, "errors", None)
        if not callable(details):
            raise _error(declaration, [("", f"is refused by {kind.__name__}: {error}")]) from error
        found = [(".".join(map(str, one["loc"])), _complaint(one, kinds)) for one in details()]
        raise _error(declaration, found) from None


def _for_pydantic(value: Any, kind: Any) -> Any:
    # Text has to be read by its type; anything else the model knows better.
    try:
        return convert(value, kind) if isinstance(value, Text) else guess(value)
    except ValueProblem:
        return guess(value)


def _complaint(one: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    expected = kinds.get(str(one["loc"][0])) if one["loc"] else None
    said = f": expected {in_words(expected)}" if expected is not None and len(one["loc"]) == 1 else ""
    if one["type"] == "missing":
        return f"is missing{said}"
    return f"is {one.get('input')!r}{said} ({one['msg']})"


def _error(declaration: Declaration, problems: Sequence[tuple[str, str]]) -> PluginConfigError:
    name = declaration.name
    parts = [f"{name}.{path} {what}" if path else f"{name} {what}" for path, what in problems]
    first = problems[0][0].partition(".")[0].partition("[")[0]
    kind = declaration.kinds().get(first)
    fix = f"correct or drop {name}.{first}" if first else "see what the plugin says of its settings"
    if kind is not None:
        fix = f"give {in_words(kind)}, with --plugin-config {name}.{first}=..."
    return PluginConfigError(
        f"plugin {name!r}: the setting{'s' if len(parts) > 1 else ''} {'; '.join(parts)}",
        code="plugin-config",
        origin=declaration.origin.label,
        fix=fix,
    )
