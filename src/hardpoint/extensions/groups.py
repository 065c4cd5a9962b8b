"""The groups other than the general one: load each, check what it yields, hand it to its consumer.

Each function imports at every call what may load by then; consumers call it once per object they build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.errors import HardpointError
from hardpoint.extensions.discovery import Found, catalogue
from hardpoint.extensions.faults import PluginRuntimeError, PluginValueError, in_words
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.loading import (
    Loaded,
    call,
    fault,
    load_group,
    logger,
    owner_of,
    raise_if_strict,
    remember_owner,
    wrong_kind,
)
from hardpoint.extensions.points import group_row
from hardpoint.extensions.refs import (
    RefAttributeError,
    RefImportError,
    RefShapeError,
    load_ref,
    parse_ref,
    resolve_obj_by_qualname,
)
from hardpoint.extensions.rows import Group

_ENDPOINT_MEMBERS = ("name", "required_tasks", "attach_router", "init_state")
_LOGITS_BASES = (
    "hardpoint.contracts.logits_processor:LogitsProcessorV1",
    "hardpoint.contracts.logits_processor:LogitsProcessorV2",
)


def load_stat_logger_plugin_factories() -> list[Any]:
    """The stat-logger classes that may load, in order.

    Raises a PluginError that is a TypeError for an object that is not a `StatLoggerBase` subclass.
    """
    row = group_row("stat_loggers")
    base = load_ref(row.contract)
    classes = []
    for loaded in load_group(row):
        if isinstance(loaded.value, type) and issubclass(loaded.value, base):
            classes.append(loaded.value)
        else:
            what = f"stat logger plugin {loaded.found.name!r} is {_kind(loaded.value)}, not a StatLoggerBase subclass"
            _reject(row, loaded.found, what)
    raise_if_strict("stat loggers")
    return classes


def load_request_hooks() -> list[type]:
    """The request-hook classes that may load, in order.

    Raises a PluginError when one cannot be imported, and one that is a TypeError for an object that is not
    a `RequestHook` subclass: a hook that may guard something is never left out quietly.
    """
    row = group_row("request_hooks")
    base = load_ref(row.contract)
    classes: list[type] = []
    for loaded in load_group(row):
        if isinstance(loaded.value, type) and issubclass(loaded.value, base):
            classes.append(loaded.value)
        else:
            what = f"request hook {loaded.found.name!r} is {_kind(loaded.value)}, not a RequestHook subclass"
            _reject(row, loaded.found, what)
    raise_if_strict("request hooks")
    return classes


def load_endpoint_plugins(supported_tasks: Sequence[str] | None) -> list[Any]:
    """The endpoint plugins to attach, built, in order.

    supported_tasks  what the server's model can do; a plugin that requires tasks and finds none
                     of them here is left out. None (no engine) leaves out every plugin that requires any.
    """
    row = group_row("endpoints")
    loaded_all = load_group(row)
    _tell_unnamed_endpoints(row)
    plugins = []
    for loaded in loaded_all:
        plugin = _build_endpoint(row, loaded)
        if plugin is None:
            continue
        required = plugin.required_tasks
        if required is None or set(required) & set(supported_tasks or ()):
            plugins.append(plugin)
            remember_owner(plugin, loaded.found)
            logger.info("endpoint plugin %r (%s) is loaded", loaded.found.name, loaded.found.package)
        else:
            has = ", ".join(supported_tasks or ()) or "none"
            why = f"it requires one of the tasks {', '.join(required)}; this server has {has}"
            ledger.record("skip", row.key, loaded.found.name, origin=loaded.found.origin, detail=why)
            logger.info("endpoint plugin %r (%s) is left out: %s", loaded.found.name, loaded.found.package, why)
    raise_if_strict("endpoint plugins")
    return plugins


def _tell_unnamed_endpoints(row: Group) -> None:
    from_variable = "it is not set"
    waiting = [e for e in ledger.entries(kind="skip", key=row.key) if e.detail.endswith(from_variable)]
    names = list(dict.fromkeys(e.name for e in waiting))
    if names:
        logger.warning(
            "endpoint plugins are installed but VLLM_PLUGINS is not set, so none of them loads: %s. "
            "Fix: name them, and every other plugin you need, in VLLM_PLUGINS",
            ", ".join(names),
        )


def _build_endpoint(row: Group, loaded: Loaded) -> Any | None:
    found = loaded.found
    try:
        plugin = call(row, loaded)
    except (Exception, SystemExit) as error:
        what = f"endpoint plugin {found.name!r}: its factory failed: {in_words(error)}"
        fault(row, found, row.call_fails, what, error, code="plugin-call")
        return None
    missing = [name for name in _ENDPOINT_MEMBERS if not hasattr(plugin, name)]
    if missing:
        what = f"endpoint plugin {found.name!r} gave {_kind(plugin)}, which lacks {', '.join(missing)}"
        _reject(row, found, what)
        return None
    if plugin.name != found.name:
        what = f"endpoint plugin {found.name!r} calls itself {plugin.name!r}; VLLM_PLUGINS compares {found.name!r}"
        ledger.record("warn", row.key, found.name, origin=found.origin, detail=what)
        logger.warning("%s", what)
    return plugin


def load_logits_processors() -> list[type]:
    """Every installed logits-processor class, in order; `VLLM_PLUGINS` does not govern this group.

    Raises a PluginError that is a RuntimeError when one cannot be imported, a ValueError when one
    implements neither interface.
    """
    row = group_row("logits_processors")
    bases = _logits_bases()
    classes: list[type] = []
    for loaded in load_group(row):
        if isinstance(loaded.value, type) and issubclass(loaded.value, bases):
            classes.append(loaded.value)
        else:
            what = (
                f"logits processor plugin {loaded.found.name!r} is {_kind(loaded.value)}, not a LogitsProcessor class"
            )
            _reject(row, loaded.found, what)
    raise_if_strict("logits processors")
    return classes


def resolve_logits_processors(items: Sequence[str | type] | None) -> list[type]:
    """The classes that `--logits-processors` or `LLM(logits_processors=...)` names, in order.

    Raises a ValueError for a malformed reference or a class of neither interface, a RuntimeError
    for a module that cannot be imported, an AttributeError for a missing name.
    """
    classes: list[type] = []
    for index, item in enumerate(items or ()):
        value = item if isinstance(item, type) else _logits_ref(index, item)
        if not (isinstance(value, type) and issubclass(value, _logits_bases())):
            raise PluginValueError(
                f"logits processor {index} ({item!r}) is {_kind(value)}, not a LogitsProcessor class",
                code="plugin-kind",
                origin="logits_processors",
                fix="derive the class from LogitsProcessor",
            )
        ledger.record("override", "logits_processors", value.__qualname__, detail=f"chosen by reference {item!r}")
        classes.append(value)
    return classes


def _logits_ref(index: int, ref: str) -> Any:
    try:
        parse_ref(ref)
        return load_ref(ref)
    except RefShapeError as error:
        raise PluginValueError(f"logits processor {index}: {error.what}", code=error.code, fix=error.fix) from None
    except RefAttributeError:
        raise
    except RefImportError as error:
        raise PluginRuntimeError(f"logits processor {index}: {error.what}", code=error.code, fix=error.fix) from error


def _logits_bases() -> tuple[type, ...]:
    return tuple(load_ref(ref) for ref in _LOGITS_BASES)


_DECLINED = "it gave None: it does not apply here"


def load_io_processors() -> dict[str, str]:
    """Name to class path of the IO-processor plugins that apply; all that may load are called."""
    row = group_row("io_processors")
    usable: dict[str, str] = {}
    for loaded in load_group(row):
        found = loaded.found
        try:
            path = call(row, loaded)
        except (Exception, SystemExit) as error:
            what = f"IO processor plugin {found.name!r} failed: {in_words(error)}"
            fault(row, found, row.call_fails, what, error, code="plugin-call")
            continue
        if isinstance(path, str):
            usable[found.name] = path
        elif path is None:
            ledger.record("skip", row.key, found.name, origin=found.origin, detail=_DECLINED)
        else:
            _reject(row, found, f"IO processor plugin {found.name!r} gave {_kind(path)}, not a class path or None")
    raise_if_strict("IO processors")
    return usable


def load_io_processor_class(requested: str) -> type:
    """The IO-processor class that the plugin named `requested` gives.

    Raises a PluginError that is a ValueError when that plugin or the class it gives is not usable.
    """
    usable = load_io_processors()
    if requested not in usable:
        known = ", ".join(usable) or "none"
        said = [entry.detail for entry in ledger.entries(key="io_processors", name=requested) if entry.detail]
        why = f"; of {requested!r}: {said[-1]}" if said else ""
        raise PluginValueError(
            f"IO processor {requested!r} is required, and no plugin provides it (usable: {known}{why})",
            code="plugin-missing",
            fix="install the plugin that provides it, and name it in VLLM_PLUGINS if that is set",
        )
    path = usable[requested]
    ledger.record("override", "io_processors", requested, detail=path)
    try:
        value: type = resolve_obj_by_qualname(path)
    except HardpointError as error:
        what = f"IO processor plugin {requested!r} gave the class path {path!r}: {error.what}"
        raise PluginValueError(what, code=error.code, fix="correct the path in the plugin") from error
    return value


def installed(key: str) -> list[Found]:
    """The installed entry points of a group, whether they may load or not. Imports nothing."""
    return catalogue.group(group_row(key).group)


def origin_label(value: Any) -> str:
    """Who an object handed out here came from, in words; empty for what came from elsewhere."""
    found = owner_of(value)
    return found.origin.label if found is not None else ""


def _reject(row: Group, found: Found, what: str) -> None:
    error = wrong_kind(row, found, what)
    fault(row, found, row.wrong_type, what, error, code="plugin-kind")


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


__all__ = [
    "installed",
    "load_endpoint_plugins",
    "load_io_processor_class",
    "load_io_processors",
    "load_logits_processors",
    "load_request_hooks",
    "load_stat_logger_plugin_factories",
    "origin_label",
    "resolve_logits_processors",
]
