"""The engine of an API server that is one of several: another process of ours started it and watches it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hardpoint.config.sections import VllmConfig
from hardpoint.errors import EngineDeadError
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.replicas import EngineReplicas
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder
from hardpoint.log import init_logger
from hardpoint.types.messages import Ready, StartFailed

logger = init_logger(__name__)
_from_parent: Decoder[Ready | StartFailed] = Decoder(Ready | StartFailed)  # type: ignore[arg-type]


class SharedEngine(EngineHandle):
    """One engine core of the parent's."""

    def __init__(self, address: str, news: EngineNews) -> None:
        super().__init__()
        self.address = address
        self._news = news
        news.tell(self)

    def begin(self, vllm_config: VllmConfig, executor_class: type | None = None, log_stats: bool = True) -> None:
        """Nothing: the parent has said it all."""

    def wait_ready(self) -> Ready:
        """Wait for the parent to say that all engine cores can serve."""
        return self._news.wait_ready()

    def connected(self) -> None:
        """Nothing: the parent is told once we take requests."""

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Let go of the engine core, which stays."""
        self._stop()

    def abandon(self) -> None:
        """Let go of it."""
        self._stop()


class EngineNews:
    """What the parent says of the engine cores: that they are ready, and later that one has ended."""

    def __init__(self, link: ParentLink) -> None:
        self._link = link
        self._engines: list[SharedEngine] = []
        self._ready: Ready | None = None

    def tell(self, engine: SharedEngine) -> None:
        """Have `engine` fail when an engine core has ended."""
        self._engines.append(engine)

    def wait_ready(self) -> Ready:
        """Wait for the engine cores. Raises ChannelClosed when the parent gives up."""
        if self._ready is None:
            message = _from_parent.decode(self._link.channel.receive())
            assert isinstance(message, Ready)
            self._ready = message
            ledger.merge(message.ledger)
            threading.Thread(target=self._listen, name="news of the engine", daemon=True).start()
        return self._ready

    def _listen(self) -> None:
        try:
            while True:
                message = _from_parent.decode(self._link.channel.receive())
                if isinstance(message, StartFailed):
                    self._fail(message)
        except ChannelClosed:
            self._fail(StartFailed("engine-died", "the process that watches the engine has ended"))

    def _fail(self, reason: StartFailed) -> None:
        for engine in self._engines:
            engine.fail(EngineDeadError(reason.what, code=reason.code, origin=reason.origin, fix=reason.fix))


def engine_at(addresses: Sequence[str], link: ParentLink) -> EngineHandle:
    """The engine whose cores listen at `addresses`, as the parent's news tell of it."""
    news = EngineNews(link)
    engines = [SharedEngine(address, news) for address in addresses]
    return engines[0] if len(engines) == 1 else EngineReplicas(engines)
