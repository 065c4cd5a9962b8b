"""The engine core of this front end as a child process: start it early, hand it its work, see it end."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from hardpoint.config.sections import VllmConfig
from hardpoint.config.weight_files import check_weights
from hardpoint.config.wire import to_wire
from hardpoint.env import envs
from hardpoint.errors import EngineDeadError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import ref_of
from hardpoint.front_end.engine_handle import EngineHandle, no_remote_engine
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import Child, spawn_child
from hardpoint.links.codec import Encoder
from hardpoint.links.sockets import SocketFolder
from hardpoint.links.workers import wait_for_ready
from hardpoint.log import init_logger
from hardpoint.types.messages import EngineCoreStart, Ready, StartFailed

logger = init_logger(__name__)
_MODULE = "hardpoint.processes.engine_core"
_encoder = Encoder()


class EngineProcess(EngineHandle):
    """One engine core process. It runs from construction on; `begin` gives it its configuration.

    preload  modules it should import while the configuration is still being made
    index    its data-parallel rank
    """

    def __init__(self, preload: Sequence[str] = (), index: int = 0) -> None:
        super().__init__()
        self._reason: StartFailed | None = None
        self._folder = SocketFolder()
        self.address = self._folder.address("core")
        self._environ = dict(os.environ)
        arguments = [part for module in preload for part in ("--preload", module)]
        try:
            self.child: Child = spawn_child(
                _MODULE, "engine core", index, arguments=arguments, folder=self._folder.path
            )
        except BaseException:
            self._folder.remove()
            raise

    def begin(self, vllm_config: VllmConfig, executor_class: type | None = None, log_stats: bool = True) -> None:
        """Send the configuration; the model starts to load. Raises ModelFileError when there is nothing to load."""
        if vllm_config.parallel_config.data_parallel_size_local == 0:
            raise no_remote_engine()
        check_weights(vllm_config)
        start = EngineCoreStart(
            config=to_wire(vllm_config),
            address=self.address,
            executor_class=None if executor_class is None else ref_of(executor_class),
            log_stats=log_stats,
            environ=_changes(self._environ, dict(os.environ)),
        )
        try:
            self.child.channel.send(_encoder.encode(start))
        except ChannelClosed:
            return  # wait_ready reports how it ended.

    def wait_ready(self) -> Ready:
        """Wait until the model can serve. Raises what stopped the start."""
        ready = wait_for_ready(self.child, time.monotonic() + envs.VLLM_ENGINE_READY_TIMEOUT_S)
        ledger.merge(ready.ledger)
        threading.Thread(target=self._read_reports, name="reports of the engine core", daemon=True).start()
        self.child.on_exit(self._exited)
        return ready

    def connected(self) -> None:
        """Everybody is connected: the socket folder has done its work."""
        self._folder.remove()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine core: politely, then by force after `timeout_s`.

        By default it has the shut-down time of workers twice: for the step that it is in and its own end, and for
        its workers, which it ends by force after that time.
        """
        self._stop()
        self.child.stop(2.0 * envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS if timeout_s is None else timeout_s)
        self._folder.remove()

    def abandon(self) -> None:
        """End the engine core at once, e.g. since the configuration turned out to be impossible."""
        self.stopped = True
        self.child.end()
        self._folder.remove()

    def _read_reports(self) -> None:
        try:
            while True:
                message = self.child.receive()
                if isinstance(message, StartFailed):
                    self._reason = message
                    self._die()
        except ChannelClosed:
            return

    def _exited(self, child: Child) -> None:
        # Its last words may still be in the pipe.
        deadline = time.monotonic() + 0.2
        while self._reason is None and time.monotonic() < deadline and not self.stopped:
            time.sleep(0.01)
        self._die()

    def _die(self) -> None:
        if self.stopped or self.error is not None:
            return
        error = self._describe()
        logger.error("%s", error)
        if self._reason is not None and self._reason.code == "unexpected":
            logger.error("traceback of the engine core:\n%s", self._reason.traceback)
        self.fail(error)

    def _describe(self) -> EngineDeadError:
        if self._reason is not None:
            reason = self._reason
            return EngineDeadError(
                f"the engine core has ended: {reason.what}", code=reason.code, origin=reason.origin, fix=reason.fix
            )
        return EngineDeadError(
            f"the engine core process (pid {self.child.pid}) {self.child.status}",
            code="engine-died",
            fix="see its output above",
        )


def _changes(before: dict[str, str], now: dict[str, str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = {name: text for name, text in now.items() if before.get(name) != text}
    changed.update({name: None for name in before if name not in now})
    return changed


def preload_for(args: Any) -> list[str]:
    """What an engine core should import while the configuration of `args` (engine arguments) is being made.

    With several ranks the workers are processes of their own and the engine core needs no torch.
    """
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    ranks = math.prod(getattr(args, name, 1) for name in sizes)
    backend = getattr(args, "distributed_executor_backend", None)
    if ranks != 1 or backend not in (None, "uni"):
        return []
    return ["torch", "hardpoint.worker.device_worker"]
