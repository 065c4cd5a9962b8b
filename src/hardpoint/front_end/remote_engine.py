"""The engine of a front end that did not start it: a headless engine, reached over TCP."""

from __future__ import annotations

import os
import socket
from concurrent.futures import wait
from typing import Any

from hardpoint.config.agreement import facts_of
from hardpoint.config.sections import VllmConfig
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.remote_link import RemoteLink
from hardpoint.links.sockets import SocketFolder
from hardpoint.links.tcp import endpoint_of, keys_for
from hardpoint.log import init_logger
from hardpoint.types.link import LinkHello
from hardpoint.types.messages import Ready

logger = init_logger(__name__)
_LISTEN_S = 0.5
_LINK_FLAGS = ("data_parallel_address", "data_parallel_rpc_port")


def is_remote(args: Any) -> bool:
    """Whether engine arguments say that the engine is elsewhere.

    Raises ConfigError when they say where it is without saying that it is.
    """
    if args.data_parallel_size_local == 0:
        return True
    given = ["--" + name.replace("_", "-") for name in _LINK_FLAGS if getattr(args, name) is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} has no meaning for a server with an engine of its own",
            code="flag-remote",
            origin=given[0],
            fix="add --headless (an engine for another server) or --data-parallel-size-local 0 (a server that uses "
            "such an engine), or leave it out",
        )
    return False


class RemoteEngine(EngineHandle):
    """A headless engine that we use until we let go of it; it stays.

    engine_args  which flags the front end was started with; the engine must have been started alike
    Raises StartError or ConfigError for an address that cannot be used.
    """

    plain = True

    def __init__(self, engine_args: Any) -> None:
        super().__init__()
        self.endpoint = endpoint_of(engine_args.data_parallel_address, engine_args.data_parallel_rpc_port)
        self._keys = keys_for(self.endpoint)
        self._engine_args = engine_args
        self._link: RemoteLink | None = None
        self._folder = SocketFolder()
        self.address = self._folder.address("core")

    def begin(self, vllm_config: VllmConfig, executor_class: type | None = None, log_stats: bool = True) -> None:
        """Look for the engine, and say what we expect of it."""
        if executor_class is not None:
            raise ConfigError("executor_class belongs to the engine, which is elsewhere", code="flag-remote")
        sender = f"{socket.gethostname()}:{os.getpid()}"
        hello = LinkHello(sender, facts_of(self._engine_args, vllm_config))
        self._link = RemoteLink(self.endpoint, self._keys, hello, self.address, self._lost)

    def wait_ready(self) -> Ready:
        """Wait until the engine serves us. Raises StartError when it refuses or does not answer in time."""
        assert self._link is not None
        while not self._link.welcome.done():
            wait([self._link.welcome], _LISTEN_S)  # Not for ever: a signal must be heard.
        ready = self._link.welcome.result().ready
        ledger.merge(ready.ledger)
        return ready

    def connected(self) -> None:
        """The socket folder has done its work."""
        self._folder.remove()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let go of the engine, which aborts what it still does for us."""
        self._stop()
        if self._link is not None:
            self._link.close()
        self._folder.remove()

    def abandon(self) -> None:
        """Let go of the engine."""
        self.shutdown()

    def _lost(self, error: EngineDeadError) -> None:
        """Called on the link's thread."""
        if not self.stopped:
            logger.error("%s", error)
            self.fail(error)
