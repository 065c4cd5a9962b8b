"""Several API servers in front of one engine: this process takes the port, starts all of them and watches them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.env import envs
from hardpoint.errors import EngineDeadError
from hardpoint.extensions.groups import load_stat_logger_plugin_factories
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.replicas import EngineReplicas, engine_of
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import Child, remaining_s, spawn_child
from hardpoint.links.codec import Encoder, pack
from hardpoint.links.workers import wait_for_ready
from hardpoint.log import init_logger
from hardpoint.processes.front_end import early_engine
from hardpoint.processes.listening import Listener
from hardpoint.processes.stopping import StopSignals
from hardpoint.types.messages import ApiServerStart, Ready, StartFailed

logger = init_logger(__name__)
_MODULE = "hardpoint.processes.api_server"
# Where the client library of Prometheus puts the figures of several processes together.
_METRICS = "PROMETHEUS_MULTIPROC_DIR"
# For servers to say 503 for a while and to write what is left, once the engine has ended.
_LAST_WORDS_S = 6.0
_FLUSH_S = 12.0
_encoder = Encoder()


def launch(args: Namespace, listener: Listener, signals: StopSignals, count: int) -> int:
    """Run `count` API servers and their engine until told to end; return the exit status.

    0 after a clean stop, 1 when the engine or an API server ended by itself. Raises what stopped the start.
    """
    with _metrics_folder() as folder:
        launcher = _Launcher(args, listener, folder)
        try:
            launcher.start(count)
            return launcher.watch(signals)
        finally:
            launcher.end()


@contextlib.contextmanager
def _metrics_folder() -> Iterator[Path | None]:
    given = os.environ.get(_METRICS)
    folder = given or tempfile.mkdtemp(prefix="hp-metrics-")
    os.environ[_METRICS] = folder
    try:
        yield None if given else Path(folder)
    finally:
        if not given:
            del os.environ[_METRICS]
            shutil.rmtree(folder, ignore_errors=True)


class _Launcher:
    def __init__(self, args: Namespace, listener: Listener, folder: Path | None) -> None:
        self._args = args
        self._listener = listener
        self._folder = folder
        self._servers: list[Child] = []
        self._engine: EngineHandle | None = None
        self._drain_s = 0.0
        # Why it is over: "" = told to end, else what ended by itself. Fed by threads and signal handlers.
        self._endings: SimpleQueue[str] = SimpleQueue()

    def start(self, count: int) -> None:
        """Return once all API servers take requests."""
        engine_args = AsyncEngineArgs.from_cli_args(self._args)
        self._engine = early_engine(engine_args)
        config = engine_args.create_engine_config("server")
        self._drain_s = config.shutdown_timeout
        engine = self._engine = self._engine or engine_of(engine_args)
        wants_stats = not engine_args.disable_log_stats or bool(load_stat_logger_plugin_factories())
        engine.begin(config, None, wants_stats)
        # They import and read the model's small files while the engine loads the large ones.
        for index in range(count):
            self._servers.append(self._start_server(engine, index, count))
        ready = engine.wait_ready()
        deadline = time.monotonic() + envs.VLLM_ENGINE_READY_TIMEOUT_S
        self._tell(ready)
        for server in self._servers:
            wait_for_ready(server, deadline)
            server.on_exit(self._server_ended)
        engine.connected()
        engine.on_death(self._engine_died)
        logger.info("ready: %s (%d API servers)", self._listener.where, count)

    def _start_server(self, engine: EngineHandle, index: int, count: int) -> Child:
        fd = self._listener.socket.fileno()
        server = spawn_child(
            _MODULE, "API server", index,
            arguments=["--listen-fd", str(fd)], inherited=[fd], folder=self._folder,
        )  # fmt: skip
        start = ApiServerStart(
            args=pack({name: value for name, value in vars(self._args).items() if name != "run"}),
            where=self._listener.where,
            addresses=_addresses(engine),
            client_count=count,
            ledger=ledger.export(),
        )
        with contextlib.suppress(ChannelClosed):  # Whoever waits for its first message reports it.
            server.channel.send(_encoder.encode(start))
        return server

    def watch(self, signals: StopSignals) -> int:
        """Wait for the end; returns the exit status."""
        signals.listen_with(lambda: self._endings.put(""))
        reason = self._endings.get()
        if not reason:
            self._stop_servers(self._drain_s + _FLUSH_S)
            return 0
        logger.error("%s", reason)
        engine_died = self._engine is not None and self._engine.error is not None
        if engine_died and envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            while self._endings.get():
                pass  # An API server that ends now ends by itself too; the signal is what counts.
            engine_died = False
        # They say 503 for a while when the engine has died, and end by themselves.
        self._stop_servers(_LAST_WORDS_S, ask=not engine_died)
        return 1

    def _stop_servers(self, grace_s: float, ask: bool = True) -> None:
        """End the API servers. `ask`: they do not know yet that they must end."""
        if ask:
            for server in self._servers:
                server.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for server in self._servers:
            server.wait(remaining_s(deadline))

    def end(self) -> None:
        """Leave nothing behind."""
        for server in self._servers:
            server.kill()
        for server in self._servers:
            server.end()
        if self._engine is not None:
            self._engine.shutdown()

    def _tell(self, message: Ready | StartFailed) -> None:
        frame = _encoder.encode(message)
        for server in self._servers:
            with contextlib.suppress(ChannelClosed):
                server.channel.send(frame)

    def _engine_died(self, error: EngineDeadError) -> None:
        self._tell(StartFailed(error.code, error.what, error.origin, error.fix))
        self._endings.put(error.what)

    def _server_ended(self, server: Child) -> None:
        self._endings.put(f"the {server.name} process (pid {server.pid}) {server.status}")


def _addresses(engine: EngineHandle) -> list[str]:
    engines = engine.replicas if isinstance(engine, EngineReplicas) else [engine]
    return [one.address for one in engines]
