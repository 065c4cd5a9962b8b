"""The thread between a front end's client, on a private local socket, and a headless engine, on TCP.

It finds the engine and is let in; from then on it passes messages, shows that we live, and notices when
the engine does not any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import zmq
from zmq.utils.monitor import recv_monitor_message

from hardpoint.env import envs
from hardpoint.errors import CodecError, EngineDeadError, HardpointError, StartError
from hardpoint.front_end.engine_search import EngineSearch
from hardpoint.links.answers import refusal
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.links.sockets import bind_router
from hardpoint.links.tcp import BEAT_S, MAX_LINK_BYTES, SILENCE_S, Endpoint, LinkKeys, connect_link
from hardpoint.log import init_logger
from hardpoint.types.link import LinkFrame, LinkHello, LinkWait, LinkWelcome
from hardpoint.types.messages import StartFailed

logger = init_logger(__name__)
_TICK_MS = 200
_TURN = 256
_JOIN_S = 5.0
_HELLO_S = 0.5
_encoder = Encoder()
_waits = Decoder(LinkWait, plain=True)
_welcomes = Decoder(LinkWelcome, plain=True)
_words = Decoder(StartFailed, plain=True)


class _Closing(Exception):
    """We were told to end."""


class RemoteLink:
    """Runs from construction on. `welcome` holds the engine's welcome, or the StartError that came instead.

    hello    what we say
    address  where the client connects; its socket is there once this returns
    on_lost  called on the thread when the engine is gone after its welcome
    """

    def __init__(
        self,
        endpoint: Endpoint,
        keys: LinkKeys | None,
        hello: LinkHello,
        address: str,
        on_lost: Callable[[EngineDeadError], None],
    ) -> None:
        self.welcome: Future[LinkWelcome] = Future()
        self._endpoint = endpoint
        self._hello = _encoder.encode(hello)
        self._on_lost = on_lost
        self._closing = False
        self._deadline = time.monotonic() + envs.VLLM_ENGINE_READY_TIMEOUT_S
        self._client: bytes | None = None
        self._heard = self._beaten = time.monotonic()
        self._context = zmq.Context()
        self._local = bind_router(self._context, address)
        self._link, self._monitor = connect_link(self._context, endpoint, keys)
        self._search = EngineSearch(endpoint)
        self._poller = zmq.Poller()
        for sock in (self._local, self._link, self._monitor):
            self._poller.register(sock, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="link to the engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye and end; from any thread."""
        self._closing = True
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self.welcome.set_result(self._seek())
            while True:
                self._wait()
                self._read_engine()
                self._read_client()
                self._watch()
        except _Closing:
            self._say_goodbye()
            self._end_with(EngineDeadError("the engine has been let go", code="engine-shutdown"))
        except HardpointError as error:
            self._end_with(error)
        except Exception as error:
            logger.exception("the link to the engine at %s failed", self._endpoint)
            self._end_with(EngineDeadError(f"the link to the engine failed: {error}", code="engine-link"))
        finally:
            self._link.disable_monitor()
            self._monitor.close(linger=0)
            self._link.close()
            # What the engine sent last is still to be delivered.
            self._local.close()
            self._context.term()

    def _end_with(self, error: HardpointError) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(error)
        elif isinstance(error, EngineDeadError):
            self._on_lost(error)
        else:
            self._on_lost(EngineDeadError(error.what, code=error.code))

    def _wait(self) -> None:
        self._poller.poll(_TICK_MS)
        if self._closing:
            raise _Closing

    def _say_goodbye(self) -> None:
        self._send(LinkFrame.GOODBYE, b"")

    def _send(self, frame: LinkFrame, *parts: bytes) -> bool:
        """False when there is no connection."""
        try:
            self._link.send_multipart([frame.value, *parts], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # Before the welcome.

    def _seek(self) -> LinkWelcome:
        """Knock until we are let in. Raises StartError when we are refused, or at the deadline."""
        search = self._search
        while True:
            self._wait()
            self._follow_connection()
            now = time.monotonic()
            if search.connected and now - self._beaten >= _HELLO_S:
                self._beaten = now
                self._send(LinkFrame.HELLO, self._hello)
            welcome = self._read_answer()
            if welcome is not None:
                logger.info("connected to the engine at %s", self._endpoint)
                self._heard = self._beaten = now
                return welcome
            search.judge(now, self._deadline)

    def _follow_connection(self) -> None:
        while self._monitor.poll(0):
            if self._search.saw(recv_monitor_message(self._monitor)["event"]):
                self._beaten = 0.0  # Connected: say hello at once.

    def _read_answer(self) -> LinkWelcome | None:
        while self._link.poll(0):
            kind, *parts = self._link.recv_multipart()
            if not parts:
                continue
            if kind == LinkFrame.WELCOME.value:
                return _welcomes.decode(parts[0])
            if kind == LinkFrame.REFUSED.value:
                words = _words.decode(parts[0])
                raise StartError(
                    f"the engine at {self._endpoint} refuses this front end: {words.what}",
                    code=words.code,
                    origin="--data-parallel-address",
                    fix=words.fix,
                )
            if kind == LinkFrame.WAIT.value:
                self._search.told(_waits.decode(parts[0]), time.monotonic())
        return None

    # After it.

    def _read_engine(self) -> None:
        for _ in range(_TURN):
            try:
                kind, *parts = self._link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            if kind == LinkFrame.DATA.value and parts and self._client is not None:
                self._deliver(parts[0])
            elif kind == LinkFrame.GOODBYE.value and parts:
                words = _words.decode(parts[0])
                self._say_goodbye()
                raise EngineDeadError(
                    f"the engine at {self._endpoint} has ended: {words.what}",
                    code=words.code,
                    origin=words.origin,
                    fix=words.fix,
                )

    def _deliver(self, data: bytes) -> None:
        try:
            self._local.send_multipart([self._client, data])
        except zmq.ZMQError as error:
            logger.debug("the client has closed its socket: %s", error)

    def _read_client(self) -> None:
        for _ in range(_TURN):
            try:
                self._client, kind, message = self._local.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(message) > MAX_LINK_BYTES:
                self._refuse(kind, message)
            elif not self._send(LinkFrame.DATA, kind, message):
                self._lose_connection()

    def _refuse(self, kind: bytes, message: bytes) -> None:
        error = CodecError(f"{len(message)} bytes are more than the link to the engine carries at once")
        answer = refusal(kind, message, error)
        if answer is not None:
            self._deliver(_encoder.encode(answer))

    def _watch(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            self._send(LinkFrame.BEAT, b"")
        while self._monitor.poll(0):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self._lose_connection()
        # Judged only once everything that has arrived is read.
        if now - self._heard > SILENCE_S and not self._link.poll(0):
            self._lose(f"nothing was heard of it for {SILENCE_S:g} s")

    def _lose_connection(self) -> None:
        while self._link.poll(_TICK_MS):
            self._read_engine()  # Its last words may have come first.
        self._lose("its connection was closed")

    def _lose(self, why: str) -> None:
        raise EngineDeadError(
            f"the engine at {self._endpoint} is gone: {why}",
            code="engine-died",
            fix="see the output of the headless engine",
        )
