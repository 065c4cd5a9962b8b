"""What a row of the table is: four frozen kinds of row and the enums their columns use."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.Flag):
    """What a process does. A process that does several things has several roles."""

    FRONT_END = enum.auto()
    ENGINE_CORE = enum.auto()
    WORKER = enum.auto()
    INSPECTOR = enum.auto()
    ALL = FRONT_END | ENGINE_CORE | WORKER | INSPECTOR

    @property
    def label(self) -> str:
        """The role in words, such as `front_end` or `engine_core+worker`."""
        return "+".join(role.name.lower() for role in Role if role in self and role.name) or "none"


class State(enum.Enum):
    """Whether something in this version reads the row."""

    BUILT = "built"
    PLANNED = "planned"


class Value(enum.Flag):
    """What an entry point yields or a registry takes."""

    FUNCTION = enum.auto()  # called without arguments
    FACTORY = enum.auto()  # called without arguments, returns the object
    CLASS = enum.auto()  # a class object
    REF = enum.auto()  # a reference string, imported on first use
    OBJECT = enum.auto()  # an instance


class Then(enum.Enum):
    """What happens to a loaded entry point."""

    CALL = "call it, ignore the result"
    ACTIVATE = "call it; a class path makes it the platform, None leaves it out"
    BUILD_PER_ENGINE = "build one per engine"
    CALL_FOR_OBJECT = "call it for the object"
    CALL_FOR_REF = "call it for a class path or None"
    USE = "use it"


class Allow(enum.Enum):
    """How `VLLM_PLUGINS` filters a group."""

    OPTIONAL = "optional"  # unset loads all
    REQUIRED = "required"  # only what is named; unset loads none
    IGNORED = "ignored"  # not consulted


class Fault(enum.Enum):
    """What a failing entry point does to its process. STOP_X is also an X for `except`."""

    SKIP_ERROR = "skip, log ERROR"
    SKIP_WARNING = "skip, log WARNING"
    SKIP_UNLESS_NAMED = "skip, log WARNING; stop when VLLM_PLUGINS names it"
    STOP = "stop"
    STOP_TYPE_ERROR = "stop, TypeError"
    STOP_VALUE_ERROR = "stop, ValueError"
    STOP_RUNTIME_ERROR = "stop, RuntimeError"
    NEVER = "cannot happen"


class Duplicate(enum.Enum):
    """What a second registration under one name does."""

    REPLACE_QUIET = "replaces, logged at DEBUG; at WARNING what was somebody else's"
    REPLACE_WARN = "replaces, logged at WARNING"
    REFUSE = "ValueError"
    ASSERT = "AssertionError"
    KEY_ERROR = "KeyError"


class Check(enum.Enum):
    """What is checked of a registered class, at once for a class and on first use for a reference."""

    NOTHING = "nothing"
    A_CLASS = "is a class, else TypeError"
    SUBCLASS_VALUE_ERROR = "is a subclass, else ValueError"
    SUBCLASS_TYPE_ERROR = "is a subclass, else TypeError"


class Case(enum.Enum):
    """How users' spellings of an entry's name are matched."""

    EXACT = "as written"
    ANY = "upper and lower case alike"


class Shape(enum.Enum):
    """What a config hook's value looks like."""

    DOTTED = "pkg.module.Class"
    DOTTED_OR_CLASS = "pkg.module.Class or a class"
    COLON_OR_CLASS_LIST = "list of pkg.module:Class or classes"
    COLON_BY_NAME = "{name: pkg.module:Class}"
    MODULE = "pkg.module"
    MODULE_OR_PATH = "pkg.module or a .py file"
    JSON = "JSON object"


@dataclass(frozen=True, slots=True)
class Group:
    """An entry-point group. `key` is our short name, `group` the name packages publish under.

    version  of the contract, here and in the other kinds of row: `contract_versions` says what it means
    """

    key: str
    group: str
    value: Value
    then: Then
    allow: Allow
    import_fails: Fault
    call_fails: Fault
    wrong_type: Fault
    roles: Role
    contract: str
    state: State
    version: str = "1.0"


@dataclass(frozen=True, slots=True)
class Registry:
    """A named set of entries that plugins add to.

    strict_duplicate  the duplicate rule when the caller uses the stricter form of the call
    base              class a registered class must derive from when `check` says subclass
    chosen_by         the flag or fact that selects an entry
    roles             processes that read it
    """

    key: str
    contract: str
    takes: Value
    check: Check
    base: str
    duplicate: Duplicate
    strict_duplicate: Duplicate
    case: Case
    chosen_by: str
    roles: Role
    state: State
    version: str = "1.0"


@dataclass(frozen=True, slots=True)
class ConfigHook:
    """A config field that names the user's class.

    field  its path in `VllmConfig`
    words  values that name something of ours instead, separated by spaces
    """

    key: str
    field: str
    flag: str
    shape: Shape
    words: str
    contract: str
    roles: Role
    state: State
    version: str = "1.0"


@dataclass(frozen=True, slots=True)
class PlatformHook:
    """A method of `Platform` that we call at a fixed moment."""

    key: str
    moment: str
    often: str
    roles: Role
    state: State
    version: str = "1.0"


Row = Group | Registry | ConfigHook | PlatformHook
