"""Child processes that live exactly as long as they should.

A child is started by exec (never by fork or multiprocessing), so a user's script needs no
`__main__` guard. It leads a session of its own: a Ctrl-C in the terminal reaches only the
parent, and whatever the child's plugins started ends with it.

The two directions of liveness:
- The parent has a thread per child that waits for its exit and then tells who asked.
- The child has a thread that waits for the end of its parent, by a pipe only the parent
  holds and by a pidfd (a process the parent forked may hold a copy of the pipe). It runs the
  registered clean-ups and kills its own process group. PR_SET_PDEATHSIG is not used: it
  follows the parent's *thread*, so an engine built in a pool thread would die with it, and
  as SIGKILL it would also prevent the clean-ups.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from hardpoint.errors import StartError
from hardpoint.links.channel import Channel, ChannelClosed
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.links.strays import end_orphaned_strays
from hardpoint.log import init_logger
from hardpoint.types.messages import ChildStart, Hello, Inspected, Ready, StartFailed

logger = init_logger(__name__)
_PARENT_POLL_S = 1.0
_KILL_WAIT_S = 10.0
# The pipe of a dying process closes a moment before its children get another parent.
_REPARENT_WAIT_S = 0.1
_encoder = Encoder()
_from_child: Decoder[Any] = Decoder(Hello | Ready | Inspected | StartFailed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ExitStatus:
    """How a process ended: exactly one of the two is set; neither when someone else reaped it."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            try:
                return f"was killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"was killed by signal {self.signal}"
        return "ended" if self.code is None else f"ended with status {self.code}"


class Child:
    """A running child as its parent sees it. Use from any thread of the process that made it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], channel: Channel, lifeline: int) -> None:
        self.name = name
        self.pid = process.pid
        self.channel = channel
        self.status: ExitStatus | None = None
        self._process = process
        self._lifeline = lifeline
        self._owner_pid = os.getpid()
        self._exited = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Child], None]] = []
        threading.Thread(target=self._watch, name=f"watch {name}", daemon=True).start()

    def on_exit(self, callback: Callable[[Child], None]) -> None:
        """Have `callback(self)` called once the child has ended, on the watching thread."""
        with self._lock:
            if not self._exited.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def alive(self) -> bool:
        """Whether the child has not ended yet."""
        return not self._exited.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when it did not come in time."""
        return self._exited.wait(timeout_s)

    def receive(self, timeout_s: float | None = None) -> Hello | Ready | Inspected | StartFailed:
        """Return the child's next report.

        Raises TimeoutError, or ChannelClosed when the child ends instead.
        """
        return _from_child.decode(self.channel.receive(timeout_s))

    def signal(self, number: int) -> None:
        """Send a signal to the child alone; nothing happens when it has ended."""
        if os.getpid() == self._owner_pid and self.alive():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """End the child and everything in its process group at once."""
        if os.getpid() == self._owner_pid and self.alive():
            _kill_group(self.pid)

    def stop(self, grace_s: float) -> bool:
        """Ask the child to end, wait `grace_s`, then force it. True when force was not needed.

        Closes the channel. In a process forked from the owner this does nothing: the child is
        not ours there.
        """
        if os.getpid() != self._owner_pid:
            return True
        self.signal(signal.SIGTERM)
        self.channel.close()
        ended = self.wait(grace_s)
        if not ended:
            logger.warning("%s (pid %d) did not end in %g s and is killed", self.name, self.pid, grace_s)
            self.end()
        return ended

    def end(self) -> None:
        """End the child and its process group at once, and wait until it has ended. Closes the channel."""
        if os.getpid() != self._owner_pid:
            return
        self.kill()
        self.channel.close()
        self.wait(_KILL_WAIT_S)

    def _watch(self) -> None:
        status = _wait_without_reaping(self.pid)
        # The dead leader still holds its pid here, so the group cannot be anyone else's.
        _kill_group(self.pid)
        code = self._process.wait()
        if status is None:
            status = ExitStatus(signal=-code) if code < 0 else ExitStatus(code=code)
        os.close(self._lifeline)
        with self._lock:
            self.status = status
            self._exited.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                logger.exception("a callback for the end of %s failed", self.name)


def _wait_without_reaping(pid: int) -> ExitStatus | None:
    if not hasattr(os, "waitid"):
        return None
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return ExitStatus()  # SIGCHLD is ignored, or the program reaps all of its children itself.
    if result is None or result.si_code == os.CLD_EXITED:
        return None
    return ExitStatus(signal=result.si_status)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def spawn_child(
    module: str,
    role: str,
    index: int = 0,
    *,
    arguments: Sequence[str] = (),
    output: tuple[IO[bytes], IO[bytes]] | None = None,
    folder: Path | None = None,
    inherited: Sequence[int] = (),
) -> Child:
    """Start `python -m module` as a child of this process.

    inherited  descriptors that the child gets under the same numbers
    output  files for its standard output and error; ours unless given
    folder  what the child removes should this process die
    The environment is passed on unchanged and so is `sys.path`, so that a plugin found here
    is found there. Raises StartError when the program cannot be started.
    """
    ours, theirs = Channel.pair()
    life_read, life_write = os.pipe()
    fds = (theirs.fileno(), life_read)
    command = [sys.executable, "-P", "-m", module, "--link-fd", str(fds[0]), "--life-fd", str(fds[1])]
    command += ["--parent", str(os.getpid()), "--index", str(index), *arguments]
    command += ["--folder", str(folder)] if folder is not None else []
    stdout, stderr = output or (None, None)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*fds, *inherited),
            start_new_session=True,
        )
    except OSError as error:
        os.close(life_write)
        ours.close()
        raise StartError(
            f"the {role} process cannot be started: {error}",
            code="child-spawn",
            origin=" ".join(command[:4]),
            fix="check that sys.executable is a Python that has hardpoint",
        ) from error
    finally:
        theirs.release()
        os.close(life_read)
    name = role if index == 0 else f"{role} {index}"
    child = Child(name, process, ours, life_write)
    try:
        ours.send(_encoder.encode(ChildStart(sys_path=[entry for entry in sys.path if isinstance(entry, str)])))
    except ChannelClosed:
        logger.debug("%s ended at once", name)  # Whoever waits for its first message reports it.
    return child


class ParentLink:
    """The child's view of its parent: a channel, and the clean-ups to run should the parent die."""

    def __init__(self, channel: Channel, parent_pid: int, index: int, options: argparse.Namespace) -> None:
        self.channel = channel
        self.index = index
        self.options = options
        self._parent_pid = parent_pid
        self._cleanups: list[Callable[[], object]] = []
        self._ending = threading.Lock()

    def send(self, message: Hello | Ready | Inspected | StartFailed) -> None:
        """Report to the parent."""
        self.channel.send(_encoder.encode(message))

    def on_parent_death(self, cleanup: Callable[[], object]) -> None:
        """Have `cleanup` run (in another thread, a second or so to finish) when the parent has died."""
        self._cleanups.append(cleanup)

    def end_with_parent(self) -> None:
        """Do not return when the parent has died. Called when the channel is closed, before this process ends.

        Otherwise the main thread would be faster than the clean-ups.
        """
        deadline = time.monotonic() + _REPARENT_WAIT_S
        while os.getppid() == self._parent_pid:
            if time.monotonic() > deadline:
                return  # It only closed the channel.
            time.sleep(0.005)
        self._end()

    def watch(self, life_fd: int) -> None:
        """Start the thread that ends this process with its parent."""
        threading.Thread(target=self._watch, args=(life_fd,), name="watch parent", daemon=True).start()

    def _watch(self, life_fd: int) -> None:
        poller = select.poll()
        poller.register(life_fd, select.POLLIN | select.POLLHUP)
        pidfd = _pidfd(self._parent_pid)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        while os.getppid() == self._parent_pid:
            if poller.poll(_PARENT_POLL_S * 1000):
                break
        self._end()

    def _end(self) -> None:
        self._ending.acquire()  # Never released: who comes second waits for the end.
        for cleanup in self._cleanups:
            # The terminal may be gone with the parent: nobody to tell of an error.
            with contextlib.suppress(Exception):
                cleanup()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _pidfd(pid: int) -> int | None:
    opener = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError:
        return None  # Gone already (getppid tells), or a kernel without it.


def attach(argv: Sequence[str], parser: argparse.ArgumentParser | None = None) -> ParentLink:
    """Take up the link to the parent. First thing a child does, before plugins load.

    `parser` may declare further arguments of the role; they end up in `ParentLink.options`.
    """
    parser = parser or argparse.ArgumentParser()
    for name in ("--link-fd", "--life-fd", "--parent", "--index"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(argv)
    # Ctrl-C is for the parent, which then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(options.life_fd, False)
    link = ParentLink(Channel.from_fd(options.link_fd), options.parent, options.index, options)
    if options.folder is not None:
        link.on_parent_death(lambda: shutil.rmtree(options.folder, ignore_errors=True))
    link.on_parent_death(end_orphaned_strays)
    link.watch(options.life_fd)
    try:
        frame = link.channel.receive()
    except ChannelClosed:
        link.end_with_parent()
        raise
    start = msgspec.msgpack.decode(frame, type=ChildStart)
    sys.path[:] = start.sys_path
    return link


def remaining_s(deadline: float) -> float:
    """Seconds until `deadline` on the monotonic clock, never negative."""
    return max(0.0, deadline - time.monotonic())
