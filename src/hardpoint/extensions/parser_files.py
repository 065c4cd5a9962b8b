"""`--tool-parser-plugin` and `--reasoning-parser-plugin`: a module or a file that registers parsers, imported once.

What looks like a path is one: it ends in `.py`, has a separator or begins with `~`. Everything else is a module's
name. A file is known by its real path and gets a module name of its own, so that it hides no module and runs once
however it is written.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

from hardpoint.errors import HardpointError, PluginError
from hardpoint.extensions.ledger import Origin, attributing, ledger
from hardpoint.extensions.registry import registry, transaction

FLAGS = {"tool_parsers": "--tool-parser-plugin", "reasoning_parsers": "--reasoning-parser-plugin"}
_PREFIX = "_hardpoint_parser_file_"

_lock = threading.RLock()
# (pid, real path or module name) -> the module, and who its registrations belong to
_imported: dict[tuple[int, str], tuple[ModuleType, Origin]] = {}


def import_parser_file(value: str, key: str) -> ModuleType:
    """Import the module or file that registers parsers; a second call does nothing.

    value  the flag's value
    key    the registry it is for, for messages

    Raises PluginError that shows the path or name, the line and the reason. What it registered until then is undone.
    """
    path = _path_of(value)
    known = (os.getpid(), str(path) if path is not None else value)
    with _lock:
        if known not in _imported:
            _imported[known] = _import(value, path, key)
        return _imported[known][0]


def registered_by(value: str, key: str) -> list[str]:
    """The names that a plugin's module or file registered in a registry."""
    path = _path_of(value)
    found = _imported.get((os.getpid(), str(path) if path is not None else value))
    return [entry.name for entry in registry(key).entries() if found is not None and entry.origin is found[1]]


def _path_of(value: str) -> Path | None:
    """The file that is meant; None for the name of a module."""
    separators = {os.sep, os.altsep or os.sep}
    if not (value.endswith(".py") or value.startswith("~") or any(sign in value for sign in separators)):
        return None
    return Path(os.path.realpath(os.path.expanduser(value)))


def _import(value: str, path: Path | None, key: str) -> tuple[ModuleType, Origin]:
    flag = FLAGS[key]
    origin = Origin(module=path.stem if path is not None else value, file=str(path or ""), group=flag)
    try:
        with transaction(), attributing(origin):
            module = _run_file(path) if path is not None else importlib.import_module(value)
    except HardpointError as error:
        error.origin = error.origin or f"{flag} {value}"
        ledger.record("fault", key, value, origin=origin, detail=error.what)
        raise
    except (Exception, SystemExit) as error:
        what = f"{flag} {value!r} cannot be used: {_reason(error, value, path)}"
        ledger.record("fault", key, value, origin=origin, detail=what)
        raise PluginError(what, code="parser-plugin", origin=flag, fix=_fix(error, path)) from error
    names = [entry.name for name in FLAGS for entry in registry(name).entries() if entry.origin is origin]
    ledger.record("load", key, value, origin=origin, detail=f"registered {', '.join(names) or 'nothing'}")
    return module, origin


def _run_file(path: Path) -> ModuleType:
    name = f"{_PREFIX}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:10]}"
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _reason(error: BaseException, value: str, path: Path | None) -> str:
    """What went wrong, with the file and the line where it did."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, FileNotFoundError) and path is not None and not path.is_file():
        return f"there is no file {path}"
    if isinstance(error, ModuleNotFoundError) and path is None and (value + ".").startswith(f"{error.name}."):
        return f"there is no module {error.name!r}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    theirs = [frame for frame in frames if f"{os.sep}hardpoint{os.sep}" not in frame.filename]
    place = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {error}{place}"


def _fix(error: BaseException, path: Path | None) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install the package that provides {error.name!r}, or give the path of a .py file"
    return "give the path of a .py file or the name of a module" if path is None else "correct the file or its path"
