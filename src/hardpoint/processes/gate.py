"""The gate of a headless engine: listens on TCP and lets one front end at a time through to the engine core.

When a front end goes, whatever the cause, its requests are aborted and the next one is let in.
"""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

import msgspec
import zmq

from hardpoint.config.agreement import difference
from hardpoint.errors import CodecError, EngineDeadError
from hardpoint.extensions.ledger import ledger
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.links.sockets import connect_dealer
from hardpoint.links.tcp import BEAT_S, SILENCE_S, Endpoint, answer_zap, bind_link, keys_for, zap_socket
from hardpoint.log import init_logger
from hardpoint.processes.session import Session
from hardpoint.types.link import EngineFacts, LinkFrame, LinkHello, LinkWait, LinkWelcome
from hardpoint.types.messages import Ready, StartFailed

logger = init_logger(__name__)
_TICK_MS = 200
# Messages taken before the other sockets have their turn.
_TURN = 256
_LONGEST_SHOWN = 300
_FAREWELL_S = 1.0
# An engine core that has ended may have sent outputs that are still on their way: until none came for so long.
_LAST_OUTPUTS_MS = 250
_LISTEN_S = 0.5
_encoder = Encoder()
_hellos = Decoder(LinkHello, plain=True)


class Gate:
    """Listens from construction on; `expect` and `open` let front ends in, `stop` ends it.

    Its thread owns the sockets; everything public is for other threads. Raises StartError when the
    address cannot be listened on, ConfigError when it needs a secret.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._keys = keys_for(endpoint)
        self._facts: EngineFacts | None = None
        self._opened: tuple[Ready, str] | None = None
        self._stop_at: float | None = None
        self._last_words = StartFailed("engine-stopped", "it was told to stop")
        # Whether the engine core has ended by itself.
        self._has_died = False
        # What ended the gate although nobody asked for it.
        self._failure: BaseException | None = None
        # The front end that is served, and the one before it until the engine core has forgotten it.
        self._session: Session | None = None
        self._leaving: Session | None = None
        self._core: Any = None
        self._context = zmq.Context()
        try:
            self._zap = None if self._keys is None else zap_socket(self._context)
            self._link = bind_link(self._context, endpoint, self._keys)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        for sock in filter(None, (self._link, self._zap)):
            self._poller.register(sock, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    # For the process.

    def expect(self, facts: EngineFacts) -> None:
        """Say what the engine is, so that a front end of another one can be refused."""
        self._facts = facts

    def open(self, ready: Ready, address: str) -> None:
        """Let front ends in: the engine core is ready at the local `address`."""
        self._opened = (ready, address)

    def stop(self, drain_s: float = 0.0) -> None:
        """End once the running requests have, or after `drain_s`. Safe in a signal handler."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + drain_s

    def engine_died(self, error: EngineDeadError) -> None:
        """Tell the front end why its engine has ended, and end."""
        self._last_words = StartFailed(error.code, error.what, error.origin, error.fix)
        self._has_died = True
        self._stop_at = 0.0

    def wait(self) -> None:
        """Wait for the end, with ears open for signals; raise what brought it about if nobody asked for it."""
        while self._thread.is_alive():
            self._thread.join(_LISTEN_S)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End at once."""
        self._stop_at = 0.0
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._poller.poll(_TICK_MS)
                self._answer_zap()
                self._read_link()
                self._read_core()
                self._tend()
        except BaseException as error:
            self._failure = error
            self._last_words = StartFailed("engine-gate", f"its gate failed: {error}")
        finally:
            self._end()

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        running = self._session is not None and self._session.running
        return not running or time.monotonic() >= self._stop_at

    def _end(self) -> None:
        if self._session is not None:
            if self._has_died:
                self._pass_on_last()
            self._take_leave(self._session)
        for sock in filter(None, (self._core, self._zap)):
            sock.close(linger=0)
        self._link.close()
        self._context.term()

    def _pass_on_last(self) -> None:
        """What the engine core has sent before it ended."""
        deadline = time.monotonic() + _FAREWELL_S
        while self._core.poll(_LAST_OUTPUTS_MS) and time.monotonic() < deadline:
            self._read_core()

    def _take_leave(self, session: Session) -> None:
        """Say why we end, and wait for the answer: what is sent just before a connection closes may be lost."""
        self._send(session.identity, LinkFrame.GOODBYE, self._last_words)
        deadline = time.monotonic() + _FAREWELL_S
        while session.ended is None and time.monotonic() < deadline:
            if self._link.poll(_TICK_MS):
                self._read_link()

    def _answer_zap(self) -> None:
        if self._zap is None or self._keys is None:
            return
        while self._zap.poll(0):
            if not answer_zap(self._zap, self._keys):
                logger.warning("a front end with another HARDPOINT_LINK_KEY was turned away")

    def _send(self, identity: bytes, frame: LinkFrame, message: Any = None) -> None:
        self._send_bytes(identity, frame, b"" if message is None else _encoder.encode(message))

    def _send_bytes(self, identity: bytes, frame: LinkFrame, data: bytes) -> None:
        try:
            self._link.send_multipart([identity, frame.value, data])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            if self._session is not None and self._session.identity == identity:
                self._session.ended = self._session.ended or "its connection was closed"

    def _read_link(self) -> None:
        for _ in range(_TURN):
            try:
                identity, *frames = self._link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if 2 <= len(frames) <= 3:
                self._take(identity, frames[0], frames[1:])

    def _take(self, identity: bytes, kind: bytes, frames: list[bytes]) -> None:
        session = self._session
        if kind == LinkFrame.HELLO.value:
            self._greet(identity, frames[0])
        elif session is None or session.identity != identity:
            if kind != LinkFrame.GOODBYE.value:
                # One that was taken for dead and is not.
                words = StartFailed("link-session", "it does not serve this front end any more")
                self._send(identity, LinkFrame.GOODBYE, words)
        else:
            session.heard = time.monotonic()
            if kind == LinkFrame.DATA.value and len(frames) == 2:
                answer = session.take(frames[0], frames[1], draining=self._stop_at is not None)
                if answer is not None:
                    self._send(identity, LinkFrame.DATA, answer)
            elif kind == LinkFrame.GOODBYE.value:
                session.ended = "it has ended"

    # Greeting.

    def _greet(self, identity: bytes, message: bytes) -> None:
        try:
            hello = _hellos.decode(message)
        except CodecError as error:
            self._send(identity, LinkFrame.REFUSED, StartFailed("link-hello", error.what))
            return
        answer = self._answer_to(identity, hello)
        if isinstance(answer, LinkWelcome):
            self._send(identity, LinkFrame.WELCOME, answer)
        elif isinstance(answer, LinkWait):
            self._send(identity, LinkFrame.WAIT, answer)
        else:
            logger.warning("the front end %s is refused: %s", _shown(hello.sender), _shown(answer.what))
            self._send(identity, LinkFrame.REFUSED, answer)

    def _answer_to(self, identity: bytes, hello: LinkHello) -> LinkWelcome | LinkWait | StartFailed:
        if self._stop_at is not None:
            return LinkWait("is shutting down")
        if self._facts is None:
            return LinkWait("is starting")
        why = difference(self._facts, hello.facts)
        if why is not None:
            return StartFailed("engine-differs", why, fix="start both with the same version, model and engine flags")
        if self._opened is None:
            return LinkWait("is loading its model")
        if self._leaving is not None:
            return LinkWait("is ending what it did for another front end")
        ready, address = self._opened
        if self._session is None:
            self._session = self._admit(identity, _shown(hello.sender), address)
        elif self._session.identity != identity:
            return LinkWait(f"is serving another front end, {self._session.sender}", busy=True)
        ledger.before_export()
        return LinkWelcome(msgspec.structs.replace(ready, ledger=[entry.to_dict() for entry in ledger.entries()]))

    def _admit(self, identity: bytes, sender: str, address: str) -> Session:
        if self._core is None:
            self._core = connect_dealer(self._context, address, 0)
            self._poller.register(self._core, zmq.POLLIN)
        logger.info("serving the front end %s", sender)
        return Session(self._core, identity, sender, self._keys is not None)

    # The engine core's side, and liveness.

    def _read_core(self) -> None:
        if self._session is not None:
            for data in self._session.outputs():
                self._send_bytes(self._session.identity, LinkFrame.DATA, data)
        elif self._leaving is not None:
            self._leaving = None if self._leaving.is_forgotten() else self._leaving
        elif self._core is not None:
            while self._core.poll(0):
                self._core.recv()  # Statistics, which nobody is there to see.

    def _tend(self) -> None:
        session, now = self._session, time.monotonic()
        if session is None:
            return
        if now - session.beaten >= BEAT_S:
            session.beaten = now
            self._send(session.identity, LinkFrame.BEAT)
        # Judged only once everything that has arrived is read.
        if now - session.heard > SILENCE_S and not self._link.poll(0):
            session.ended = session.ended or f"nothing was heard of it for {SILENCE_S:g} s"
        if session.ended is not None:
            self._part(session, session.ended)

    def _part(self, session: Session, why: str) -> None:
        self._send(
            session.identity, LinkFrame.GOODBYE, StartFailed("link-session", f"it gave this front end up: {why}")
        )
        count = session.leave()
        logger.info("the front end %s is gone: %s; %d requests of it are aborted", session.sender, why, count)
        self._session, self._leaving = None, session


def _shown(text: str) -> str:
    """Words that somebody else chose, safe in a log line."""
    return "".join(char if char.isprintable() else "?" for char in text[:_LONGEST_SHOWN])
