"""Import and call entry points under the fault rules of their rows, and remember the outcome.

State here is per process id: a forked child starts afresh and loads again.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from types import TracebackType
from typing import Any

from hardpoint.env import envs
from hardpoint.errors import PluginError
from hardpoint.extensions import contract_versions, plugin_config
from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS
from hardpoint.extensions.discovery import Allowlist, Found, catalogue
from hardpoint.extensions.faults import error_for, in_words, leave_out
from hardpoint.extensions.ledger import attributing, ledger, plugin_place
from hardpoint.extensions.patches import patches
from hardpoint.extensions.points import GROUPS, group_row
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import transaction
from hardpoint.extensions.rows import Allow, Fault, Group, Role, Value
from hardpoint.extensions.setting_words import PluginConfigError
from hardpoint.log import attach, init_logger

logger = init_logger("hardpoint.extensions")

SLOW_S = 0.5  # an import or call longer than this is worth telling
_STUCK_S = 10.0  # an import or call longer than this is told while it runs
ALIAS = "hardpoint.compat:install"  # answers `import vllm` in code of others
_CONTRACT, _WRONG_KIND = "plugin-contract", "plugin-kind"  # codes of our own words about a plugin
_HEAVY = ("torch", "transformers")  # each costs seconds; the ledger tells who brings them in
_DEVICE = "a CUDA device"
IMPORTS = "it imports "  # in the ledger, before the heavy modules that came along
POLICY_VARIABLE = "HARDPOINT_PLUGIN_POLICY"
POLICIES = ("compatible", "strict")


@dataclass(slots=True)
class Loaded:
    """An entry point whose import succeeded. `seconds` counts import and call together."""

    found: Found
    value: Any
    seconds: float


@dataclass(slots=True)
class Problem:
    """Something that went wrong with one entry point, or with the list of names."""

    found: Found | None
    name: str
    what: str


@dataclass(slots=True)
class ProcessState:
    """What this process has loaded so far."""

    pid: int = field(default_factory=os.getpid)
    roles: Role = field(default_factory=lambda: Role(0))
    loaded: list[Loaded] = field(default_factory=list)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    booted: bool = False
    failure: Exception | None = None
    owners: dict[int, tuple[Any, Found]] = field(default_factory=dict)


class _Holder:
    def __init__(self) -> None:
        self.state = ProcessState()
        self.lock = threading.RLock()


_holder = _Holder()
lock = _holder.lock


def state() -> ProcessState:
    """The state of this process; a new one after a fork."""
    if _holder.state.pid != os.getpid():
        _holder.state = ProcessState()
    return _holder.state


def reset() -> None:
    """Forget what was loaded, so that the next boot loads again (tests)."""
    _holder.state = ProcessState()
    catalogue.forget()


def set_policy(policy: str) -> None:
    """Set the plugin policy of this process and its children: `compatible` or `strict`."""
    os.environ[POLICY_VARIABLE] = policy


def loaded_plugins() -> list[tuple[str, str, str]]:
    """Name, distribution and version of the general plugins that this process has loaded, sorted."""
    general = GROUPS[0].group
    found = [one.found for one in state().loaded if one.found.group == general and not one.found.built_in]
    return sorted({(one.name, one.distribution, one.version) for one in found})


def absent_plugins() -> list[str]:
    """The installed general plugins that did not load in this process, each with the reason."""
    ours = BUILTIN_ENTRY_POINTS.get(GROUPS[0].group, {})
    failed = {e.name: e.detail for e in ledger.entries(kind="fault", key="general", pid=os.getpid())}
    out = {name: why for (key, name), why in state().left_out.items() if key == "general" and name not in ours}
    return [*failed.values(), *(f"plugin {name!r} is left out: {why}" for name, why in out.items())]


def is_strict() -> bool:
    """Whether every skip and every oddity stops the process."""
    return bool(envs.HARDPOINT_PLUGIN_POLICY == "strict")


def load_group(row: Group) -> list[Loaded]:
    """Import what may load of a group, in order of discovery.

    Two entry points under one name: the later one takes the place of the earlier one, except in a
    group that uses all. Raises what the row says of a failed import.
    """
    kept: dict[str, Loaded] = {}
    everything: list[Loaded] = []
    for found in allowed(row):
        loaded = _import(row, found)
        if loaded is None:
            continue
        earlier = kept.get(found.name)
        kept[found.name] = loaded
        everything.append(loaded)
        if earlier is not None:
            _report_duplicate(row, earlier.found, found)
    plugin_config.check_given()
    return everything if row.allow is Allow.IGNORED else list(kept.values())


def allowed(row: Group) -> list[Found]:
    """The installed entry points of a group that the allowlist lets load; the others are noted as left out."""
    allowlist = Allowlist.read()
    found = catalogue.group(row.group)
    level = logging.DEBUG if row.key == "general" else logging.INFO
    if not found:
        logger.debug("group %s: no plugin is installed", row.group)
        return []
    may_load = []
    for point in found:
        ledger.record("discover", row.key, point.name, origin=point.origin, detail=f"{point.name} = {point.value}")
        why_not = allowlist.refusal(row, point.name)
        verb = f"left out, {why_not}" if why_not else "loads"
        quiet = logging.DEBUG if point.built_in else level
        logger.log(quiet, "group %s: %s = %s (%s): %s", row.group, point.name, point.value, point.package, verb)
        if why_not:
            state().left_out[row.key, point.name] = why_not
            ledger.record("skip", row.key, point.name, origin=point.origin, detail=why_not)
        else:
            may_load.append(point)
    return may_load


def _import(row: Group, found: Found) -> Loaded | None:
    started = time.perf_counter()
    before = _heavy()
    if not found.built_in:
        load_ref(ALIAS)()
        _show_logger(found)
    try:
        with attributing(found.origin), watching(row, found, "import"), all_or_nothing():
            module = import_module(found.module)
            _require_contracts(found)
            path = [part for part in found.path.split(".") if part]
            value = reduce(getattr, path, module)
    except (Exception, SystemExit) as error:
        what = f"plugin {found.name!r} cannot be imported from {found.value!r}: {in_words(error)}"
        fault(row, found, row.import_fails, what, error, code="plugin-import")
        return None
    seconds = time.perf_counter() - started
    origin = found.origin_with_file()
    if not found.built_in:
        ledger.know_package(found.module.partition(".")[0], origin)
    patches.look(origin)
    detail = "; ".join(filter(None, [found.value, _brought(row, found, "import", before)]))
    ledger.record("load", row.key, found.name, origin=origin, duration_s=seconds, detail=detail)
    loaded = Loaded(found, value, seconds)
    state().loaded.append(loaded)
    remember_owner(value, found)
    return loaded


@contextmanager
def all_or_nothing() -> Iterator[None]:
    """Keep what is registered and declared inside the block only if it ends without an exception."""
    with transaction(), plugin_config.transaction():
        yield


def _require_contracts(found: Found) -> None:
    """Refuse a plugin whose module states a range of contract versions that ours lie outside of."""
    why = contract_versions.unmet(found.module)
    if why:
        raise PluginError(
            f"plugin {found.name!r} ({found.package}) is refused: {why}",
            code=_CONTRACT,
            origin=f"{found.origin.label}, in {ledger.role}",
            fix=f"install a version of {found.distribution} that is made for these contracts, or another version of "
            f"Hardpoint; HARDPOINT_PLUGINS_DENY={found.name} leaves it out",
        )


def call(row: Group, loaded: Loaded) -> Any:
    """Call a loaded function, keeping its registrations only if it returns.

    Raises PluginError for what is not callable, raises, exits or is a coroutine function; apply
    the row's fault rule with `fault` to anything raised here.
    """
    found, value = loaded.found, loaded.value
    if not callable(value):
        raise wrong_kind(row, found, f"plugin {found.name!r} is {type(value).__name__}, which cannot be called")
    started = time.perf_counter()
    before = _heavy()
    with attributing(found.origin_with_file()), watching(row, found, "call"), all_or_nothing():
        result = value()
        if inspect.iscoroutine(result):
            result.close()
            raise wrong_kind(row, found, f"plugin {found.name!r} is a coroutine function, and nothing awaits it")
    seconds = time.perf_counter() - started
    loaded.seconds += seconds
    origin = found.origin_with_file()
    patches.look(origin)
    detail = _brought(row, found, "call", before)
    ledger.record("call", row.key, found.name, origin=origin, duration_s=seconds, detail=detail)
    return result


def _heavy() -> frozenset[str]:
    """What this process holds of the things that a front end should stay free of."""
    found = {name for name in _HEAVY if name in sys.modules}
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    asks = getattr(cuda, "is_initialized", None)
    return frozenset({*found, _DEVICE} if asks is not None and asks() else found)


def _brought(row: Group, found: Found, doing: str, before: frozenset[str]) -> str:
    """What an import or call has brought into the process, in words; a device in a front end is warned of."""
    new = _heavy() - before
    if _DEVICE in new and state().roles == Role.FRONT_END:
        what = (
            f"the {doing} of plugin {found.name!r} has initialised CUDA in the front end, which stays free of devices"
        )
        fix = "register classes as 'module:Class' strings, and touch devices in workers only"
        ledger.record("warn", row.key, found.name, origin=found.origin_with_file(), detail=what, fix=fix)
        logger.warning("%s. Fix: %s", what, fix)
    modules = ", ".join(name for name in _HEAVY if name in new)
    return f"{IMPORTS}{modules}" if modules else ""


def wrong_kind(row: Group, found: Found, what: str) -> PluginError:
    """The error for an object that is not what the group takes."""
    return error_for(
        row.wrong_type,
        what,
        code=_WRONG_KIND,
        origin=f"{found.origin.label}, in {ledger.role}",
        fix=f"let the entry point name {_KINDS.get(row.value, 'the right object')}{_contract(row)}",
    )


def _contract(row: Group) -> str:
    return f" ({row.contract.replace(':', '.')})" if row.contract else ""


_KINDS = {
    Value.FUNCTION: "a function without arguments",
    Value.FACTORY: "a class or function that returns the object when called without arguments",
    Value.CLASS: "a class that derives from the contract",
}


def fault(row: Group, found: Found, rule: Fault, what: str, error: BaseException, *, code: str) -> None:
    """Apply a fault rule: log and note a skip, or raise the row's error chained to `error`.

    Settings that a plugin cannot have are the user's mistake, not the plugin's: that error is raised as it is.
    """
    origin = found.origin_with_file()
    fix = leave_out(found.origin)
    if isinstance(error, PluginConfigError):
        ledger.record("fault", row.key, found.name, origin=origin, detail=error.what, fix=error.fix)
        raise error
    # Our own words about the plugin rather than what it raised.
    ours = isinstance(error, PluginError) and error.code in (_CONTRACT, _WRONG_KIND)
    if isinstance(error, PluginError) and ours:
        what, fix, code = error.what, error.fix, error.code
        rule = row.wrong_type if code == _WRONG_KIND else rule
    ledger.record("fault", row.key, found.name, origin=origin, detail=what, fix=fix)
    named = Allowlist.read().names_it(found.name)
    skips = rule in (Fault.SKIP_ERROR, Fault.SKIP_WARNING) or (rule is Fault.SKIP_UNLESS_NAMED and not named)
    if skips or is_strict():
        state().problems.append(Problem(found, found.name, what))
        level = logging.ERROR if rule is Fault.SKIP_ERROR or not skips else logging.WARNING
        trace = None if ours else (type(error), error, _plugin_part(error.__traceback__))
        outcome = "it is left out" if skips else "the start stops"
        logger.log(level, "%s; %s [from %s]. Fix: %s", what, outcome, origin.label, fix, exc_info=trace)
        return
    if code == _WRONG_KIND:
        raise error
    cause, place = (None, "") if ours else (error, plugin_place(error, found.origin.module))
    where = f"{origin.label}, in {ledger.role}" + (f", at {place}" if place else "")
    raise error_for(rule, what, code=code, origin=where, fix=fix) from cause


def _plugin_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of ours and of the import system that lead to the plugin."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_LEADING):
        trace = trace.tb_next
    return trace


_LEADING = ("hardpoint.extensions", "importlib")


def _report_duplicate(row: Group, earlier: Found, later: Found) -> None:
    used = "both are used" if row.allow is Allow.IGNORED else f"the one of {later.package} is used"
    what = f"group {row.group} has {later.name!r} twice, from {earlier.package} and from {later.package}: {used}"
    fix = "uninstall one of the two"
    ledger.record("warn", row.key, later.name, origin=later.origin, detail=what, fix=fix)
    logger.warning("%s. Fix: %s", what, fix)
    if row.allow is not Allow.IGNORED:
        state().problems.append(Problem(later, later.name, what))


def raise_if_strict(where: str) -> None:
    """Under the strict policy, stop with every problem so far in one error."""
    problems = state().problems
    if not (is_strict() and problems):
        return
    listed = "; ".join(f"({number}) {problem.what}" for number, problem in enumerate(problems, 1))
    error = PluginError(
        f"{where}: {len(problems)} plugin problem{'s' if len(problems) > 1 else ''}: {listed}",
        code="plugin-strict",
        origin="--plugin-policy strict",
        fix="mend or leave out what is listed, or start without --plugin-policy strict",
    )
    state().problems = []
    raise error


def load_plugins_by_group(group: str) -> dict[str, Any]:
    """Import the entry points of a group that may load: name to object, nothing called or checked."""
    try:
        row = group_row(group)
    except KeyError:
        row = _any_group(group)
    return {loaded.found.name: loaded.value for loaded in load_group(row)}


def _any_group(group: str) -> Group:
    general = GROUPS[0]
    return Group(
        group, group, general.value, general.then, general.allow, general.import_fails,
        general.call_fails, general.wrong_type, general.roles, "", general.state,
    )  # fmt: skip


def remember_owner(value: Any, found: Found) -> None:
    """Note who an object came from, for `owner_of`."""
    state().owners[id(value)] = (value, found)


def owner_of(value: Any) -> Found | None:
    """The entry point a loaded object came from, or None."""
    _, found = state().owners.get(id(value), (None, None))
    return found


@contextmanager
def watching(row: Group, found: Found, doing: str) -> Iterator[None]:
    """Tell when a plugin keeps the process waiting, while it still does."""

    def tell() -> None:
        what = f"plugin {found.name!r} ({found.package}): its {doing} is still running after {_STUCK_S:g} s"
        ledger.record("warn", row.key, found.name, origin=found.origin, detail=what, fix=leave_out(found.origin))
        logger.warning("%s; the start waits for it", what)

    ledger.announce(row.key, found.name, found.origin, doing)
    timer = threading.Timer(_STUCK_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _show_logger(found: Found) -> None:
    """Let the plugin's own log lines be seen, unless it or somebody else arranged its logging."""
    root = found.module.partition(".")[0]
    if root in sys.stdlib_module_names or not envs.VLLM_CONFIGURE_LOGGING:
        return
    its_logger = logging.getLogger(root)
    if its_logger.level == logging.NOTSET and not its_logger.handlers and root not in ("vllm", "hardpoint"):
        attach(root, envs.VLLM_LOGGING_LEVEL)
