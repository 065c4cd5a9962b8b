from __future__ import annotations

import socket
import time

import pytest
import zmq

from hardpoint.errors import ConfigError, StartError
from hardpoint.links.tcp import answer_zap, bind_link, connect_link, endpoint_of, keys_for, zap_socket

SECRET = "correct horse battery staple"
OPEN = "203.0.113.77"  # An address that other machines could reach.


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("HARDPOINT_LINK_KEY", raising=False)


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_defaults_and_spelling_of_addresses():
    endpoint = endpoint_of(None, None)
    assert (str(endpoint), endpoint.address, endpoint.is_loopback) == (
        "127.0.0.1:29550", "tcp://127.0.0.1:29550", True,
    )  # fmt: skip
    assert endpoint_of("::1", 5).address == "tcp://[::1]:5"
    assert endpoint_of("::1", 5).is_loopback
    assert not endpoint_of(OPEN, 5).is_loopback
    assert not endpoint_of("0.0.0.0", 5).is_loopback
    assert not endpoint_of("::", 5).is_loopback


def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(StartError, match=r"no\.such\.host\.invalid"):
        endpoint_of("no.such.host.invalid", 5)


@pytest.mark.parametrize("host", [OPEN, "0.0.0.0", "::"])
def test_an_address_that_others_reach_needs_a_secret(monkeypatch, host):
    with pytest.raises(ConfigError, match="HARDPOINT_LINK_KEY is not set"):
        keys_for(endpoint_of(host, 5))
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET)
    assert keys_for(endpoint_of(host, 5)) is not None


def test_keys_come_from_the_secret_alone_and_a_short_one_is_refused(monkeypatch):
    assert keys_for(endpoint_of(None, None)) is None
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET)
    keys = keys_for(endpoint_of(None, None))
    assert keys == keys_for(endpoint_of(OPEN, 9))
    assert len(set(keys)) == 4
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET + "!")
    assert not set(keys) & set(keys_for(endpoint_of(None, None)))
    monkeypatch.setenv("HARDPOINT_LINK_KEY", "short")
    with pytest.raises(ConfigError, match="5 characters"):
        keys_for(endpoint_of(None, None))


def test_a_taken_port_and_a_foreign_address_are_named(context):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            bind_link(context, endpoint_of("127.0.0.1", port), None)
    with pytest.raises(StartError, match=f"{OPEN} is not an address of this machine"):
        bind_link(context, endpoint_of(OPEN, port), None)


def heard(context, router, zap, keys, client_keys, within_s=1):
    """What an engine hears of a front end with these keys or none."""
    endpoint = endpoint_of("127.0.0.1", int(router.last_endpoint.rpartition(b":")[2]))
    link, monitor = connect_link(context, endpoint, client_keys)
    deadline, sent = time.monotonic() + within_s, False
    try:
        while time.monotonic() < deadline:
            if zap.poll(10):
                answer_zap(zap, keys)
            if not sent and link.poll(10, zmq.POLLOUT):
                link.send(b"hello")
                sent = True
            if router.poll(10):
                return router.recv_multipart()[1]
        return None
    finally:
        link.disable_monitor()
        monitor.close(linger=0)
        link.close(linger=0)


def test_only_a_front_end_with_the_same_secret_is_heard(context, monkeypatch):
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET)
    endpoint = endpoint_of("127.0.0.1", 0)
    keys = keys_for(endpoint)
    zap = zap_socket(context)
    router = bind_link(context, endpoint, keys)
    clients = zmq.Context()
    try:
        monkeypatch.setenv("HARDPOINT_LINK_KEY", "another secret of that length")
        other = keys_for(endpoint)
        assert heard(clients, router, zap, keys, other) is None
        assert heard(clients, router, zap, keys, None) is None
        # Somebody who has found out the engine's public key, and nothing else.
        half = other._replace(server_public=keys.server_public)
        assert heard(clients, router, zap, keys, half) is None
        assert heard(clients, router, zap, keys, keys, 60) == b"hello"
    finally:
        clients.destroy(linger=0)
        context.destroy(linger=0)
