from __future__ import annotations

import os
import stat
import time

import pytest
import zmq

from hardpoint.errors import ConfigError
from hardpoint.links.sockets import SocketFolder, bind_router, connect_dealer, identity_of


@pytest.fixture
def base(tmp_path_factory, monkeypatch):
    # Not below pytest's own folder: its path would be too long for a socket.
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield folder


def test_the_folder_is_private_and_goes_away(base):
    folder = SocketFolder()
    assert folder.path.parent == type(folder.path)(base)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.remove()
    folder.remove()
    assert os.listdir(base) == []


def test_messages_pass_both_ways_also_after_the_folder_is_gone(base):
    folder = SocketFolder()
    context = zmq.Context()
    try:
        dealer = connect_dealer(context, folder.address("core"), 3)
        dealer.send_multipart([b"\x05", b"hello"])
        router = bind_router(context, folder.address("core"))
        assert router.poll(5000)
        assert router.recv_multipart() == [identity_of(3), b"\x05", b"hello"]
        folder.remove()
        router.send_multipart([identity_of(3), b"answer"])
        assert dealer.poll(5000)
        assert dealer.recv() == b"answer"
        dealer.send_multipart([b"\x00", b"x" * 5_000_000])
        assert router.poll(5000)
        assert len(router.recv_multipart()[2]) == 5_000_000
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("path", ["/no/such/folder", "/tmp/" + "x" * 120])
def test_a_folder_that_cannot_hold_sockets_is_refused_by_name(monkeypatch, path):
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", path)
    with pytest.raises(ConfigError, match="VLLM_RPC_BASE_PATH"):
        SocketFolder()


def test_a_long_temporary_folder_is_replaced_by_a_short_one(monkeypatch):
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "y" * 120)
    folder = SocketFolder()
    assert str(folder.path).startswith("/tmp/hp-")
    folder.remove()


def test_only_old_folders_of_dead_processes_are_swept(base):
    dead, old = "hp-4194999-aaaaaaaa", time.time() - 7200
    for name in (dead, f"hp-{os.getpid()}-bbbbbbbb", "hp-4194998-cccccccc", "hp-other"):
        os.mkdir(os.path.join(base, name))
        os.utime(os.path.join(base, name), (old, old))
    os.utime(os.path.join(base, "hp-4194998-cccccccc"))
    folder = SocketFolder()
    left = set(os.listdir(base))
    folder.remove()
    assert dead not in left
    assert len(left) == 4
