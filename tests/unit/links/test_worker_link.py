from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hardpoint.contracts.worker_calls import RemoteCallError
from hardpoint.errors import CodecError, ConfigError, EngineDeadError
from hardpoint.links.channel import Channel, ChannelClosed
from hardpoint.links.worker_link import WorkerLink, serve_calls


class Odd(Exception):
    """Cannot be rebuilt from its text."""

    def __init__(self, one, two):
        super().__init__(f"odd {one} {two}")


class Target:
    def add(self, left, right=1):
        return left + right

    def boom(self):
        raise Odd(1, 2)

    def bad_config(self):
        raise ConfigError("wrong", code="c", fix="mend")

    def missing_key(self):
        return {}["absent"]

    def slow(self):
        time.sleep(60)

    def weird(self):
        return lambda: 1

    def big(self):
        return np.zeros(20_000_000, np.uint8)

    value = 3


@pytest.fixture
def link():
    ours, theirs = Channel.pair()
    server = threading.Thread(target=serve_calls, args=(theirs, Target()), daemon=True)
    server.start()
    link = WorkerLink(ours, "worker 0")
    yield link
    link.close()
    server.join(60)
    assert not server.is_alive()
    theirs.close()


def test_results_come_back_in_the_order_of_the_calls(link):
    futures = [link.submit("add", (i,), {"right": 10}) for i in range(50)]
    assert [future.result(60) for future in futures] == [i + 10 for i in range(50)]


def test_a_large_result_crosses_while_more_calls_are_sent(link):
    futures = [link.submit("big")] + [link.submit("add", (np.zeros(1_000_000),)) for _ in range(10)]
    assert futures[0].result(60).nbytes == 20_000_000
    assert futures[-1].result(60).sum() == 1_000_000


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [
        ("boom", RemoteCallError, "Odd: odd 1 2"),
        ("bad_config", ConfigError, "wrong"),
        ("missing_key", KeyError, "absent"),
        ("no_such", NotImplementedError, "no_such"),
        ("value", NotImplementedError, "value"),
        ("weird", CodecError, "function"),
        (7, TypeError, "name or a callable"),
    ],
)
def test_an_error_reaches_the_caller_and_the_worker_lives(link, method, kind, text):
    with pytest.raises(kind, match=text):
        link.call(method)
    assert link.call("add", (1,)) == 2


def test_past_the_limit_the_caller_is_told_and_the_worker_goes_on(link):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="slow"):
        link.call("slow", timeout_s=0.2)
    assert link.call("add", (1,)) == 2
    assert time.monotonic() - started < 30


def test_a_function_crosses_only_when_allowed(link, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    with pytest.raises(CodecError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        link.call(lambda worker: worker.value)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    assert link.call(lambda worker, more: worker.value + more, (4,)) == 7


def test_what_cannot_be_read_is_an_error_of_that_call_alone(link, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(CodecError, match="cannot be read"):
        link.call("add", (_Unreadable(),))
    assert link.call("add", (1,)) == 2


class _Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def test_the_end_of_a_worker_fails_everything_that_waits():
    ours, theirs = Channel.pair()
    link = WorkerLink(ours, "worker 1")
    future = link.submit("slow")
    theirs.close()
    with pytest.raises(EngineDeadError, match="worker 1 has ended"):
        future.result(60)
    with pytest.raises(EngineDeadError, match="worker 1"):
        link.call("add", (1,))
    link.close()


def test_frames_of_any_size_and_the_end_of_the_other_side():
    left, right = Channel.pair()
    for size in (0, 1, 70_000):
        left.send(b"x" * size)
        assert right.receive(60) == b"x" * size
    with pytest.raises(TimeoutError):
        right.receive(0.01)
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive(60)
    with pytest.raises(ChannelClosed):
        right.send(b"x")
    right.close()


def test_an_impossible_length_is_refused():
    left, right = Channel.pair()
    left._socket.sendall(b"\xff" * 8)
    with pytest.raises(ChannelClosed, match="beyond the limit"):
        right.receive(60)
    left.close()
    right.close()
