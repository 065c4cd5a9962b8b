"""Processes that compile constraints on trial, each of which can be ended when it takes too long or too much."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hardpoint.config.wire import to_wire
from hardpoint.contracts.structured_output import GrammarError, MalformedConstraint
from hardpoint.engine_core.structured.trial import DONE, FAILED, MALFORMED, READY, REFUSED
from hardpoint.errors import StartError
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import Child, remaining_s, spawn_child
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.log import init_logger
from hardpoint.types.messages import GrammarCompilerStart, GrammarJob, GrammarVerdict, TokenTable

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)
_MODULE = "hardpoint.processes.grammar_compiler"
# A library may have to be imported first, with torch; the time of a constraint does not count that.
_LOAD_S = 120.0
_LOOK_S = 0.05
_MIB = 1 << 20
_STOP_S = 1.0


class CompilerFault(Exception):
    """A trial that failed through no fault of the constraint."""


class CompilerProcess:
    """One grammar compiler, started with its first job and again after it had to be ended. One thread uses it."""

    def __init__(self, vllm_config: VllmConfig, table: TokenTable, index: int) -> None:
        self._vllm_config = vllm_config
        self._table = table
        self._index = index
        self._child: Child | None = None
        self._encoder = Encoder()
        self._verdicts = Decoder(GrammarVerdict)

    def run(self, job: GrammarJob, limit_s: float, limit_mib: int) -> bytes | None:
        """Compile on trial; returns the dump, if the backend makes one.

        Raises GrammarError when the constraint is refused or takes more than the limits, CompilerFault
        when the process or the backend cannot be used.
        """
        try:
            child = self._running()
            child.channel.send(self._encoder.encode(job))
            ready = self._verdicts.decode(child.channel.receive(_LOAD_S))
            if ready.stage != READY:
                return _settled(ready)
            return self._await(child, limit_s, limit_mib)
        except (ChannelClosed, TimeoutError) as problem:
            self.end()
            raise CompilerFault(f"the grammar compiler cannot be reached: {problem}") from None
        except StartError as problem:
            raise CompilerFault(str(problem)) from None

    def _await(self, child: Child, limit_s: float, limit_mib: int) -> bytes | None:
        deadline, base = time.monotonic() + limit_s, _resident_bytes(child.pid)
        while True:
            try:
                verdict = self._verdicts.decode(child.channel.receive(min(_LOOK_S, max(0.001, remaining_s(deadline)))))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    self.end()
                    raise GrammarError(f"compiling takes longer than {limit_s:g} s") from None
                if _resident_bytes(child.pid) - base > limit_mib * _MIB:
                    self.end()
                    raise GrammarError(f"compiling takes more than {limit_mib} MiB of memory") from None
                continue
            except ChannelClosed:
                self.end()
                raise GrammarError("compiling it ended the compiler") from None
            return _settled(verdict)

    def _running(self) -> Child:
        if self._child is not None and self._child.alive():
            return self._child
        self.end()
        self._child = child = spawn_child(_MODULE, "grammar compiler", self._index)
        try:
            child.receive(_LOAD_S)  # Hello
            start = GrammarCompilerStart(to_wire(self._vllm_config), self._table)
            child.channel.send(self._encoder.encode(start))
        except (ChannelClosed, TimeoutError) as problem:
            self.end()
            raise StartError(f"the grammar compiler does not start: {problem}", code="grammar-compiler") from None
        return child

    def end(self) -> None:
        """End the process at once, if it runs."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait(_STOP_S)
            child.channel.close()


class CompilerPool:
    """A bounded number of compiler processes. Use from any thread."""

    def __init__(self, vllm_config: VllmConfig, table: TokenTable, size: int) -> None:
        self._idle = [CompilerProcess(vllm_config, table, index) for index in range(size)]
        self._all = list(self._idle)
        self._changed = threading.Condition()

    def run(self, job: GrammarJob, limit_s: float, limit_mib: int) -> bytes | None:
        """Compile on trial with the next process that is free; see `CompilerProcess.run`."""
        with self._changed:
            while not self._idle:
                self._changed.wait()
            # The one used last is running and warm.
            compiler = self._idle.pop()
        try:
            return compiler.run(job, limit_s, limit_mib)
        finally:
            with self._changed:
                self._idle.append(compiler)
                self._changed.notify()

    def shutdown(self) -> None:
        """End all processes."""
        for compiler in self._all:
            compiler.end()


def _settled(verdict: GrammarVerdict) -> bytes | None:
    """The dump of a job that is done, or its error."""
    if verdict.stage == MALFORMED:
        raise MalformedConstraint(verdict.reason)
    if verdict.stage == REFUSED:
        raise GrammarError(verdict.reason)
    if verdict.stage == FAILED:
        raise CompilerFault(verdict.reason)
    assert verdict.stage == DONE, verdict.stage
    return verdict.dump


def _resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not tell."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
