"""The TCP sockets between a headless engine and its front end, encrypted and authenticated by a shared secret.

With HARDPOINT_LINK_KEY set, both ends derive the same two CurveZMQ key pairs from it. A front end
proves that it knows the secret by the client key, an engine by the server key, and everything
between them is encrypted with keys of their own for each connection. Without it only a loopback
address is accepted.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from hardpoint.env import envs
from hardpoint.errors import ConfigError, StartError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 29550
# The largest request and the largest step's outputs are far below; more is damage or malice.
MAX_LINK_BYTES = 256 << 20
# Each side shows that it lives this often, and takes the other for dead after this silence.
BEAT_S = 1.0
SILENCE_S = 6.0
_FLAGS = "--data-parallel-address, --data-parallel-rpc-port"
_SHORTEST_KEY = 16
_HANDSHAKE_MS = 5000
_LINGER_MS = 1000
_RECONNECT_MS = 200
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens. `host` as given, `ip` as it was found."""

    host: str
    port: int
    ip: str

    @property
    def address(self) -> str:
        """For ZeroMQ."""
        return f"tcp://[{self.ip}]:{self.port}" if ":" in self.ip else f"tcp://{self.ip}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.ip.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class LinkKeys(NamedTuple):
    """Two CurveZMQ key pairs, in their text form."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def endpoint_of(host: str | None, port: int | None) -> Endpoint:
    """Find the address that the flags mean. Raises StartError when the host cannot be resolved."""
    host = host or DEFAULT_HOST
    port = DEFAULT_PORT if port is None else port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"the host {host!r} cannot be resolved: {error}",
            code="host-unknown",
            origin="--data-parallel-address",
            fix="give the name or address of the machine with the engine",
        ) from None
    return Endpoint(host, port, str(found[0][4][0]))


def keys_for(endpoint: Endpoint) -> LinkKeys | None:
    """The keys of the link; None on a loopback address without HARDPOINT_LINK_KEY.

    Raises ConfigError where a secret is missing or too short.
    """
    secret = envs.HARDPOINT_LINK_KEY
    if not secret:
        if endpoint.is_loopback:
            return None
        raise _key_error(f"{endpoint} can be reached from other machines and HARDPOINT_LINK_KEY is not set")
    if len(secret) < _SHORTEST_KEY:
        raise _key_error(f"HARDPOINT_LINK_KEY has {len(secret)} characters, which is too short to be a secret")
    if not zmq.has("curve"):
        raise _key_error("the installed pyzmq was built without CURVE, so a link with a key is not possible")
    return LinkKeys(*_key_pair(secret, b"server"), *_key_pair(secret, b"client"))


def _key_error(what: str) -> ConfigError:
    return ConfigError(
        what,
        code="link-key",
        origin=f"HARDPOINT_LINK_KEY, {_FLAGS}",
        fix=f"set HARDPOINT_LINK_KEY to the same random text of at least {_SHORTEST_KEY} characters for engine "
        "and front end (`openssl rand -hex 32` makes one)",
    )


def _key_pair(secret: str, side: bytes) -> tuple[bytes, bytes]:
    """(public, secret). Slow on purpose: a weak secret must be expensive to guess from recorded traffic."""
    text = secret.encode("utf-8", "surrogateescape")
    raw = hashlib.scrypt(text, salt=b"hardpoint link, " + side, n=1 << 14, r=8, p=1, dklen=32)
    private = z85.encode(raw)
    return zmq.curve_public(private), private


def bind_link(context: zmq.Context[Any], endpoint: Endpoint, keys: LinkKeys | None) -> Any:
    """The engine's socket: a ROUTER that raises when a front end has gone.

    With keys, somebody must answer the socket of `zap_socket`, made before in the same context.
    Raises StartError naming the address when it is taken or not this machine's.
    """
    sock = context.socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A front end that sends faster than it is read waits; what it is sent is bounded by its silence.
    sock.setsockopt(zmq.SNDHWM, 0)
    _options(sock)
    if keys is not None:
        sock.curve_server = True
        sock.curve_publickey, sock.curve_secretkey = keys.server_public, keys.server_secret
    try:
        sock.bind(endpoint.address)
    except zmq.ZMQError as error:
        sock.close(linger=0)
        raise _bind_error(error, endpoint) from None
    return sock


def connect_link(context: zmq.Context[Any], endpoint: Endpoint, keys: LinkKeys | None) -> tuple[Any, Any]:
    """A front end's socket, and the one that tells what becomes of its connection.

    A DEALER that connects again and again until it is closed, and queues nothing meanwhile.
    """
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.IMMEDIATE, 1)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, _HANDSHAKE_MS)
    _options(sock)
    if keys is not None:
        sock.curve_serverkey = keys.server_public
        sock.curve_publickey, sock.curve_secretkey = keys.client_public, keys.client_secret
    monitor = sock.get_monitor_socket()
    sock.connect(endpoint.address)
    return sock, monitor


def _options(sock: Any) -> None:
    sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_LINK_BYTES)


def _bind_error(error: zmq.ZMQError, endpoint: Endpoint) -> StartError:
    place = f"port {endpoint.port} on {endpoint.host}"
    if error.errno == errno.EADDRINUSE:
        what, fix = f"{place} is in use", "stop what listens there, or choose another with --data-parallel-rpc-port"
    elif error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        what = f"{endpoint.host} is not an address of this machine"
        fix = "the engine listens and the front end connects: give an address of the engine's machine to both"
    elif error.errno == errno.EACCES:
        what, fix = f"{place} may not be used by this user", "choose a port of 1024 or more"
    else:
        what, fix = f"{place} cannot be listened on: {error.strerror}", "choose another address or port"
    return StartError(what, code="port", origin=_FLAGS, fix=fix)


def zap_socket(context: zmq.Context[Any]) -> Any:
    """Where libzmq asks whether a client's key is welcome; for `answer_zap`."""
    sock = context.socket(zmq.REP)
    sock.setsockopt(zmq.LINGER, 0)
    sock.bind(_ZAP_ADDRESS)
    return sock


def answer_zap(sock: Any, keys: LinkKeys) -> bool:
    """Answer one question of ZeroMQ's authentication protocol (RFC 27); returns the answer."""
    version, request_id, _domain, _address, _identity, mechanism, *credentials = sock.recv_multipart()
    known = mechanism == b"CURVE" and credentials == [z85.decode(keys.client_public)]
    status, text = (b"200", b"OK") if known and version == _ZAP_VERSION else (b"400", b"unknown key")
    sock.send_multipart([_ZAP_VERSION, request_id, status, text, b"", b""])
    return status == b"200"
