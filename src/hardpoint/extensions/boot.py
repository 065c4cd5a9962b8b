"""Boot a process's role: choose the platform, then load and call the general plugins, once per process id.

    boot(Role.WORKER)                the first line of a process
    load_general_plugins()           the same for code that has no role of its own
    load_plugins_by_group(group)     import one group, call nothing

The other groups load when their consumer asks: see `groups`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from hardpoint.errors import PluginError
from hardpoint.extensions import plugin_config
from hardpoint.extensions.discovery import Allowlist, catalogue
from hardpoint.extensions.faults import in_words
from hardpoint.extensions.groups import (
    load_endpoint_plugins,
    load_io_processor_class,
    load_io_processors,
    load_logits_processors,
    load_request_hooks,
    load_stat_logger_plugin_factories,
    resolve_logits_processors,
)
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.loading import (
    ALIAS,
    SLOW_S,
    Loaded,
    Problem,
    ProcessState,
    call,
    fault,
    load_group,
    load_plugins_by_group,
    lock,
    logger,
    owner_of,
    raise_if_strict,
    set_policy,
    state,
)
from hardpoint.extensions.platform_choice import load_platform_detectors, resolve_platform_cls_qualname
from hardpoint.extensions.points import group_row
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"
PLATFORM_PLUGINS_GROUP = "vllm.platform_plugins"
STAT_LOGGER_PLUGINS_GROUP = "vllm.stat_logger_plugins"
ENDPOINT_PLUGINS_GROUP = "vllm.endpoint_plugins"
IO_PROCESSOR_PLUGINS_GROUP = "vllm.io_processor_plugins"
LOGITSPROCS_GROUP = "vllm.logits_processors"

_PLATFORM = "hardpoint.platforms:current_platform"
_MOST_NAMES = 25


@dataclass(frozen=True, slots=True)
class Booted:
    """What a boot left behind. `loaded` names the general and platform plugins that are in use."""

    pid: int
    roles: Role
    loaded: tuple[str, ...]
    left_out: tuple[str, ...]
    failed: tuple[str, ...]


def boot(role: Role) -> Booted:
    """Load what the role needs, once per process id; a second call adds the role and loads nothing.

    Raises PluginError naming plugin, distribution and role when a fault rule says to stop, and
    the same error again at every later call in this process.
    """
    with lock:
        now = state()
        now.roles |= role
        ledger.role = now.roles.label
        if now.failure is not None:
            raise now.failure.with_traceback(None)
        if not now.booted:
            now.booted = True
            _boot(now)
        return _result(now)


def load_general_plugins() -> None:
    """Boot this process if that has not happened yet; as a front end unless it has a role already."""
    boot(state().roles or Role.FRONT_END)


def has_booted() -> bool:
    """Whether this process has loaded its plugins (or failed to)."""
    return state().booted


def _boot(now: ProcessState) -> None:
    started = time.perf_counter()
    try:
        load_ref(ALIAS)()
        _tell_names()
        load_ref(_PLATFORM)
        for loaded in load_group(group_row("general")):
            _call_general(loaded)
        plugin_config.check_given()
        if Role.FRONT_END in now.roles:
            report_unused_settings()
        raise_if_strict(f"in {ledger.role}")
    except Exception as error:
        now.failure = error
        raise
    except BaseException:
        now.booted = False  # interrupted: nothing is known to be wrong
        raise
    finally:
        _summarise(now, time.perf_counter() - started)


def _call_general(loaded: Loaded) -> None:
    row, found = group_row("general"), loaded.found
    try:
        call(row, loaded)
    except (Exception, SystemExit) as error:
        what = f"plugin {found.name!r} failed: {in_words(error)}; its registrations are undone"
        fault(row, found, row.call_fails, what, error, code="plugin-call")


def report_unused_settings(final: bool = False) -> None:
    """Warn of settings that reach no plugin.

    final  every plugin of this process has had its turn; under the strict policy this raises then
    """
    for name, why in plugin_config.unused(final):
        what = f"settings are given for plugin {name!r}, and nobody reads them: {why}"
        fix = f"correct or drop --plugin-config {name}.*"
        ledger.record("warn", "plugin_config", name, detail=what, fix=fix)
        logger.warning("%s. Fix: %s", what, fix)
        state().problems.append(Problem(None, name, what))
    if final:
        raise_if_strict("settings of plugins")


def _tell_names() -> None:
    allowlist = Allowlist.read()
    logger.debug("%s", allowlist.in_words())
    for name, remark in allowlist.remarks(catalogue.all()):
        ledger.record("warn", "VLLM_PLUGINS", name, detail=remark, fix=f"correct {remark.partition(' ')[0]}")
        logger.warning("%s", remark)
        state().problems.append(Problem(None, name, remark))


def _summarise(now: ProcessState, seconds: float) -> None:
    """One INFO line per process that has anything to tell."""
    result = _result(now)
    installed = any(not found.built_in for group in catalogue.all().values() for found in group)
    slow = [f"{one.found.name} {one.seconds:.1f} s" for one in now.loaded if one.seconds > SLOW_S]
    parts = [f"loaded {_listed(result.loaded)}", f"left out {_listed(result.left_out)}"]
    parts += [f"failed {_listed(result.failed)}"] if result.failed else []
    parts += ["stopped by an error"] if now.failure is not None else []
    replaced = [f"{e.key} {e.name} ({e.detail})" for e in ledger.entries(kind="replace", pid=os.getpid())]
    parts += [f"replaced {_listed(replaced)}"] if replaced else []
    parts += [f"slow {_listed(slow)}"] if slow else []
    policy = Allowlist.read().in_words()
    log = logger.info if installed else logger.debug
    log("plugins of %s (%.0f ms): %s. %s", ledger.role, seconds * 1000, "; ".join(parts), policy)


def _result(now: ProcessState) -> Booted:
    failed = {problem.found for problem in now.problems if problem.found is not None}
    faults = {(e.key, e.name) for e in ledger.entries(kind="fault", pid=now.pid)}
    fine = [
        f"{one.found.name} ({one.found.package}, {one.seconds * 1000:.0f} ms)"
        for one in now.loaded
        if one.found not in failed and (group_row(one.found.group).key, one.found.name) not in faults
    ]
    out = [f"{name} ({why})" for (_, name), why in now.left_out.items()]
    return Booted(now.pid, now.roles, tuple(fine), tuple(out), tuple(dict.fromkeys(name for _, name in faults)))


def _listed(names: tuple[str, ...] | list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


__all__ = [
    "DEFAULT_PLUGINS_GROUP",
    "ENDPOINT_PLUGINS_GROUP",
    "IO_PROCESSOR_PLUGINS_GROUP",
    "LOGITSPROCS_GROUP",
    "PLATFORM_PLUGINS_GROUP",
    "STAT_LOGGER_PLUGINS_GROUP",
    "Booted",
    "PluginError",
    "boot",
    "has_booted",
    "load_endpoint_plugins",
    "load_general_plugins",
    "load_io_processor_class",
    "load_io_processors",
    "load_logits_processors",
    "load_platform_detectors",
    "load_plugins_by_group",
    "load_request_hooks",
    "load_stat_logger_plugin_factories",
    "owner_of",
    "report_unused_settings",
    "resolve_logits_processors",
    "resolve_platform_cls_qualname",
    "set_policy",
]
