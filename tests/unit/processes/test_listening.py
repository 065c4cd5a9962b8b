from __future__ import annotations

import os
import socket
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import pytest

from hardpoint.errors import StartError
from hardpoint.processes.listening import listen


def at(host=None, port=0, uds=None, **more):
    return Namespace(host=host, port=port, uds=uds, ssl_keyfile=None, **more)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_the_port_is_ours_at_once():
    listener = listen(at("127.0.0.1"))
    port = listener.socket.getsockname()[1]
    try:
        assert listener.where == f"http://127.0.0.1:{port}"
        # Connections wait in the queue while the model loads.
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(StartError, match=f"port {port} on 127.0.0.1 is in use"):
            listen(at("127.0.0.1", port))
    finally:
        listener.close()
    listen(at("127.0.0.1", port)).close()


def test_a_port_whose_last_server_has_just_ended_is_free():
    listener = listen(at("127.0.0.1"))
    port = listener.socket.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    served, _ = listener.socket.accept()
    # The side that closes first is the one that stays in TIME_WAIT.
    served.close()
    client.close()
    listener.close()
    listen(at("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ("no-such-host.invalid", "no-such-host.invalid"),
        ("192.0.2.1", "not an address of this machine"),
        ("a\0b", "host"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_at_once(host, what):
    started = time.monotonic()
    with pytest.raises(StartError, match=what):
        listen(at(host))
    assert time.monotonic() - started < 30


def test_a_socket_file_comes_and_goes(folder):
    path = folder / "server.sock"
    listener = listen(at(uds=str(path)))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    with pytest.raises(StartError, match="another server listens"):
        listen(at(uds=str(path)))
    listener.close()
    assert not path.exists()


def test_a_stale_socket_file_is_replaced_and_other_files_are_not(folder):
    path = folder / "server.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    listen(at(uds=str(path))).close()
    path.write_text("precious")
    with pytest.raises(StartError, match="not a socket"):
        listen(at(uds=str(path)))
    assert path.read_text() == "precious"


def test_a_socket_file_that_cannot_be_made_is_named(folder):
    with pytest.raises(StartError, match="cannot be made"):
        listen(at(uds=os.fspath(folder / "missing" / "server.sock")))
    with pytest.raises(StartError, match="cannot be made"):
        listen(at(uds=os.fspath(folder / ("x" * 200))))
