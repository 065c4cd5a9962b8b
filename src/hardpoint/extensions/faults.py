"""Errors of extensions, typed as each row's fault column says."""

from __future__ import annotations

from hardpoint.errors import PluginError
from hardpoint.extensions.ledger import Origin, ledger
from hardpoint.extensions.rows import Fault


class PluginTypeError(PluginError, TypeError):
    """A plugin's object is of the wrong kind."""


class PluginValueError(PluginError, ValueError):
    """A plugin's object or name is not usable."""


class PluginRuntimeError(PluginError, RuntimeError):
    """A plugin cannot be loaded and the row says to stop."""


_ERRORS: dict[Fault, type[PluginError]] = {
    Fault.STOP_TYPE_ERROR: PluginTypeError,
    Fault.STOP_VALUE_ERROR: PluginValueError,
    Fault.STOP_RUNTIME_ERROR: PluginRuntimeError,
}


def error_for(fault: Fault, what: str, *, code: str, origin: str, fix: str) -> PluginError:
    """The coded error of a fault, of the type its column names."""
    return _ERRORS.get(fault, PluginError)(what, code=code, origin=origin, fix=fix)


def leave_out(origin: Origin) -> str:
    """The fix for a plugin that fails."""
    package = f"{origin.distribution} {origin.version}".strip() or origin.module
    mend = "correct what it complains of" if origin.distribution == "hardpoint" else f"mend or uninstall {package}"
    return f"{mend}, or leave it out with HARDPOINT_PLUGINS_DENY={origin.entry_point}" if origin.entry_point else mend


def note_fault(key: str, name: str, what: str, origin: Origin | None) -> None:
    """Note what a plugin did wrong while it was used; under its entry point's name where `origin` tells one."""
    if origin is None:
        ledger.record("fault", key, name, detail=what)
    else:
        ledger.record("fault", key, origin.entry_point or name, origin=origin, detail=what, fix=leave_out(origin))


def in_words(error: BaseException) -> str:
    """An exception as `Type: message`; a call of sys.exit says so."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
