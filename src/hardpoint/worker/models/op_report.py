"""After a model is built: which ops it has, what replaced them, and which switches or registrations hit nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.custom_op import Build, CustomOp, build_log, op_registry, op_registry_oot
from hardpoint.extensions.ledger import attributing, ledger
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)


def custom_op_log_check(vllm_config: VllmConfig) -> None:
    """Log and record what became of `custom_ops` and of the registered replacements. Call it once per model."""
    switches = vllm_config.compilation_config.custom_ops
    _log_counts(vllm_config)
    _check_switches(switches)
    _check_replacements(switches)


def _log_counts(vllm_config: VllmConfig) -> None:
    config = vllm_config.compilation_config
    if not config.enabled_custom_ops and not config.disabled_custom_ops:
        logger.debug("No custom ops found in model.")
        return
    logger.debug("enabled custom ops: %s", dict(config.enabled_custom_ops))
    logger.debug("disabled custom ops: %s", dict(config.disabled_custom_ops))


def _built_ops() -> dict[type, Build]:
    return {cls: build for cls, build in build_log.builds.items() if issubclass(cls, CustomOp)}


def _check_switches(custom_ops: Iterable[str]) -> None:
    built = _built_ops()
    present = {name for cls in built for name in cls.switch_names()}  # type: ignore[attr-defined]
    class_to_op = {cls.__name__: name for name, cls in op_registry.items() if issubclass(cls, CustomOp)}
    for switch in custom_ops:
        name = switch[1:]
        if switch in ("all", "none") or name in present:
            continue
        known = name in op_registry or name in op_registry_oot
        why = "not present in model" if known else "doesn't exist (or wasn't imported/registered)"
        verb = "enabling" if switch.startswith("+") else "disabling"
        near = class_to_op.get(name) or _near(name, present)
        hint = f"; did you mean {switch[0]}{near}?" if near else ""
        message = f"custom op {name!r} {why}: {verb} it with {switch!r} has no effect{hint}"
        logger.warning_once("%s", message)
        fix = f"write {switch[0]}{near} in custom_ops" if near else f"leave {switch} out of custom_ops"
        ledger.record("warn", "oot_ops", name, detail=message, fix=fix)


def _check_replacements(switches: Sequence[str]) -> None:
    asked = {build.asked.__name__ for build in build_log.builds.values()}
    for row in ("oot_ops", "pluggable_layers"):
        for entry in registry(row).entries():
            cls = entry.load()
            build = build_log.builds.get(cls)
            with attributing(entry.origin):
                if build is None:
                    _report_unbuilt(row, entry.name, asked)
                else:
                    _report_built(row, entry.name, cls, build, switches)


def _report_built(row: str, key: str, cls: type, build: Build, switches: Sequence[str]) -> None:
    place = f"{cls.__module__}.{cls.__qualname__} in place of {build.asked.__qualname__}, built {build.count} times"
    if not issubclass(cls, CustomOp):
        ledger.record("override", row, key, detail=place)
        return
    ledger.record("override", row, key, detail=f"{place}, runs {build.method or 'what its first call chooses'}")
    wanted_off = any(f"-{name}" in switches for name in cls.switch_names())
    if not build.enabled and not wanted_off:
        what = f"custom op {cls.__qualname__} replaces {build.asked.__qualname__} but is switched off: "
        what += "its forward_native runs"
        logger.info("%s; add +%s to custom_ops", what, key)
        ledger.record("warn", row, key, detail=what, fix=f"add +{key} to custom_ops")
    kept = sorted(
        other.__qualname__
        for other in build_log.builds
        if issubclass(other, build.asked) and other not in (cls, build.asked) and not issubclass(other, cls)
    )
    if kept:
        logger.info("custom op %s replaces %s, not what derives from it: %s", cls.__qualname__,
                    build.asked.__qualname__, ", ".join(kept))  # fmt: skip


def _report_unbuilt(row: str, key: str, asked: set[str]) -> None:
    op_class = op_registry.get(key)
    known = {cls.__name__ for cls in op_registry.values()} | asked
    absent = key in known
    near = "" if absent or op_class is not None else _near(key, known)
    if op_class is not None:
        message = f"{key!r} is an op's name, replacements go by class name: register it for {op_class.__name__!r}"
        fix = f"use @{op_class.__name__}.register_oot"
    elif absent:
        message = f"the replacement for {key!r} is not used: this model has no {key}"
        fix = "nothing, if other models have one"
    else:
        message = f"nothing is called {key!r}" + (f"; did you mean {near!r}?" if near else "")
        fix = f"use @{near}.register_oot" if near else "register it for the class it replaces"
    # A package may well replace more than one model has.
    ledger.record("skip" if absent else "warn", row, key, detail=f"registered but never built: {message}", fix=fix)
    log = logger.info if absent else logger.warning_once
    log("%s entry %r is registered but never built: %s", row, key, message)


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    # First as it is spelled: an op may be known as rms_norm and as RMSNorm.
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if found:
        return found[0]
    folded = {other.replace("_", "").lower(): other for other in names}
    close = difflib.get_close_matches(name.replace("_", "").lower(), folded, n=1, cutoff=0.75)
    return folded[close[0]] if close else ""
