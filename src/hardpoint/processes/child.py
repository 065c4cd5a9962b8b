"""What every child process does around its own work: attach, boot, report, end."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from hardpoint.contracts.worker import let_waiting_threads_sleep
from hardpoint.errors import HardpointError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.faults import leave_out
from hardpoint.extensions.ledger import plugin_behind, plugin_place
from hardpoint.extensions.rows import Role
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import ParentLink, attach
from hardpoint.log import configure, init_logger
from hardpoint.types.messages import Hello, StartFailed

logger = init_logger(__name__)


def run_child(
    argv: Sequence[str],
    role: Role,
    name: str,
    body: Callable[[ParentLink], int],
    parser: argparse.ArgumentParser | None = None,
) -> int:
    """Run one child from its first line to its exit status.

    name    the role in log lines
    body    the work; what it raises is reported to the parent, which tells the user
    parser  declares the role's own arguments
    """
    link = attach(argv, parser)
    let_waiting_threads_sleep()
    configure(f"{name} {link.index}" if link.index else name)
    try:
        boot(role)
        link.send(Hello(pid=os.getpid(), role=name, index=link.index))
        return body(link)
    except ChannelClosed:
        link.end_with_parent()
        return 1  # The parent gave up.
    except BaseException as error:
        report_failure(link, error)
        return 1


def end_process(status: int) -> NoReturn:
    """End this process without taking its interpreter apart.

    What waits for the end gets its turn, as in children of multiprocessing: threads that are no daemons, then
    `atexit`. Freeing every module and object of torch afterwards takes seconds on a busy machine, in which the
    other ranks wait for this one to close its sockets and the parent for this process.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The terminal may be gone.
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(status)


def report_failure(link: ParentLink, error: BaseException) -> None:
    """Tell the parent why this process ends; the parent logs it once for the user."""
    logger.debug("this process ends", exc_info=error)
    try:
        link.send(described(error))
    except ChannelClosed:
        link.end_with_parent()
        logger.error("this process ends: %s", error, exc_info=error)


def described(error: BaseException) -> StartFailed:
    """The parts of an error that another process can show."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, HardpointError):
        return StartFailed(error.code, error.what, error.origin, error.fix, trace, type(error).__name__)
    what = f"{type(error).__name__}: {str(error) or 'no message'}"
    plugin = plugin_behind(error)
    if plugin is not None:
        return StartFailed("plugin-code", what, f"{plugin.label}, at {plugin_place(error)}", leave_out(plugin), trace)
    return StartFailed("unexpected", what, origin=_place(error), traceback=trace)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def preload(modules: Sequence[str]) -> None:
    """Import what will be needed while the parent still prepares.

    An import that fails is left for the place that needs it, where the error can be explained.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            logger.debug("preloading %s failed: %s", module, error)


def apply_environ(changes: Mapping[str, str | None]) -> None:
    """Take over what the parent changed in its environment since it started this process."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
