"""What a front end holds of its engine core, wherever that runs: its address, and whether it still lives."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

from hardpoint.config.sections import VllmConfig
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.types.messages import Ready


class EngineHandle(ABC):
    """An engine core: `begin`, `wait_ready`, connect to `address`, `connected`; in the end `shutdown` or `abandon`.

    address  of the socket that a client connects to, once `wait_ready` has returned
    """

    address: str
    # Whether only plain data may come from it, since it is on another machine.
    plain = False

    def __init__(self) -> None:
        # Why nothing can be asked of the engine core any more; None while it runs.
        self.error: EngineDeadError | None = None
        # Whether it ends because we said so.
        self.stopped = False
        self.owner_pid = os.getpid()
        self._listeners: list[weakref.WeakMethod[Callable[[EngineDeadError], None]]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def begin(self, vllm_config: VllmConfig, executor_class: type | None = None, log_stats: bool = True) -> None:
        """Say what the engine core is to run."""

    @abstractmethod
    def wait_ready(self) -> Ready:
        """Wait until the model can serve. Raises what stopped the start."""

    @abstractmethod
    def connected(self) -> None:
        """Hear that everybody is connected."""

    @abstractmethod
    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let go of the engine core, which gets `timeout_s` to end what it does for us."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of it at once, e.g. since the configuration turned out to be impossible."""

    def on_death(self, listener: Callable[[EngineDeadError], None]) -> None:
        """Have the bound method `listener` called, from another thread, when the engine core ends by itself.

        It is held weakly: an engine that nobody uses any more must be collected.
        """
        with self._lock:
            if self.error is None:
                self._listeners.append(weakref.WeakMethod(listener))
                return
        listener(self.error)

    def check(self) -> None:
        """Raise EngineDeadError when the engine core has ended, or when this process is a fork of its owner."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        if os.getpid() != self.owner_pid:
            raise EngineDeadError(
                f"this engine belongs to process {self.owner_pid}, of which this one (pid {os.getpid()}) is a fork",
                code="engine-forked",
                fix="build the engine after the fork",
            )

    def fail(self, error: EngineDeadError) -> None:
        """Declare the engine dead, also while its process runs: nothing can be made of its outputs."""
        with self._lock:
            if self.stopped or self.error is not None:
                return
            self.error = error
            listeners, self._listeners = self._listeners, []
        for weak in listeners:
            listener = weak()
            if listener is not None:
                listener(error)

    def _stop(self) -> None:
        """Note that the end, which comes, is wanted."""
        self.stopped = True
        if self.error is None:
            self.error = EngineDeadError("the engine has been shut down", code="engine-shutdown")


def no_remote_engine() -> ConfigError:
    """The error for an engine elsewhere where it cannot be used."""
    return ConfigError(
        "data_parallel_size_local is 0: an engine that is elsewhere serves `hardpoint serve` and "
        "AsyncLLM.from_engine_args, and nothing else",
        code="config-unsupported",
        fix="leave it out",
    )


def no_replicas(where: str) -> ConfigError:
    """The error for data_parallel_size above 1 where one engine core is used."""
    return ConfigError(
        f"data_parallel_size is more than 1: replicas serve `hardpoint serve` and AsyncLLM, not {where}",
        code="config-unsupported",
        fix="leave it out, or start one process per replica",
    )
