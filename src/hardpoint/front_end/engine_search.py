"""What is known of a headless engine that has not let us in yet, and when to give up."""

from __future__ import annotations

import zmq

from hardpoint.errors import StartError
from hardpoint.links.tcp import Endpoint
from hardpoint.log import init_logger
from hardpoint.types.link import LinkWait

logger = init_logger(__name__)
_REPORT_S = 10.0
# The engine notices within a few seconds that the front end before us has died.
_BUSY_S = 15.0
# Connections in a row that ended before a word was said.
_MOST_FAILURES = 3
_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_ORIGIN = "--data-parallel-address, --data-parallel-rpc-port"


class EngineSearch:
    """Follows the connection and the engine's answers, and tells the user about them.

    connected  whether the other end speaks our protocol, with our keys
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.connected = False
        self._endpoint = endpoint
        self._state = "nothing listens there yet"
        self._failures = 0
        self._heard = False
        self._busy_since: float | None = None
        self._reported = ("", 0.0)

    def saw(self, event: int) -> bool:
        """Take in an event of the socket; True for a new connection."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected, self._heard = True, False
            return True
        if event == zmq.EVENT_CLOSED:
            self._state, self._failures = "nothing listens there yet", 0
        elif event in _REFUSED:
            self._failures = _MOST_FAILURES
        elif event == zmq.EVENT_DISCONNECTED:
            self.connected = False
            if not self._heard:
                self._failures += 1
        return False

    def told(self, answer: LinkWait, now: float) -> None:
        """Take in the engine's answer."""
        self._heard, self._failures = True, 0
        self._state = f"it {answer.why}"
        self._busy_since = (self._busy_since or now) if answer.busy else None

    def judge(self, now: float, deadline: float) -> None:
        """Tell the user how things stand; raise StartError when there is no point in going on."""
        if self._failures >= _MOST_FAILURES:
            raise StartError(
                f"what listens at {self._endpoint} does not accept this front end: its HARDPOINT_LINK_KEY is another, "
                "or it is not a headless engine",
                code="link-key",
                origin=_ORIGIN,
                fix="set HARDPOINT_LINK_KEY to the same text for both, or for neither, and check address and port",
            )
        if now >= deadline:
            raise self._give_up("engine-unreachable", "did not serve this front end in time")
        if self._busy_since is not None and now - self._busy_since >= _BUSY_S:
            raise self._give_up("engine-busy", "has no room for this front end")
        state, since = self._reported
        if state != self._state or now - since >= _REPORT_S:
            self._reported = (self._state, now)
            logger.info("waiting for the engine at %s: %s", self._endpoint, self._state)

    def _give_up(self, code: str, what: str) -> StartError:
        return StartError(
            f"the engine at {self._endpoint} {what}: {self._state}",
            code=code,
            origin=_ORIGIN,
            fix="start one with --headless and the same address; VLLM_ENGINE_READY_TIMEOUT_S says how long to wait"
            if code == "engine-unreachable"
            else "stop the other front end, or start another engine",
        )
