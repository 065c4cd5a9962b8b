"""A gate, links to it and a make-believe engine core, in one process."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import zmq

from hardpoint.errors import EngineDeadError, StartError
from hardpoint.front_end import remote_link
from hardpoint.front_end.remote_link import RemoteLink
from hardpoint.links.codec import Decoder, Encoder, tagged
from hardpoint.links.sockets import SocketFolder, bind_router, connect_dealer
from hardpoint.links.tcp import endpoint_of, keys_for
from hardpoint.processes import gate as gate_module
from hardpoint.processes import session as session_module
from hardpoint.processes.gate import Gate
from hardpoint.types.finish import FinishReason
from hardpoint.types.link import EngineFacts, LinkHello
from hardpoint.types.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    Ready,
    UtilityCall,
    UtilityOutput,
)
from hardpoint.types.sampling_params import SamplingParams
from process_tools import wait_until
from server_process import free_port

FACTS = EngineFacts("1.0", "a-model", "config", "weights", {})
SECRET = "a secret that is long enough"
ADD, ABORT, CALL = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.UTILITY


class Core:
    """Takes everything in, answers calls with `results`, and says what it is told to say."""

    def __init__(self, address):
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self.calls: list[str] = []
        self.results: dict[str, object] = {}
        self._say: list[EngineCoreOutputs] = []
        self._over = False
        self._encoder = Encoder()
        self._context = zmq.Context()
        self._router = bind_router(self._context, address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._over:
            while self._say:
                self._send(self._say.pop(0))
            if not self._router.poll(10):
                continue
            identity, kind, data = self._router.recv_multipart()
            assert identity == b"client-0"
            if kind == ADD.value:
                request = Decoder(EngineCoreRequest).decode(data)
                self.requests[request.request_id] = request
            elif kind == ABORT.value:
                self.aborted += Decoder(list[str]).decode(data)
            elif kind == CALL.value:
                call = Decoder(UtilityCall).decode(data)
                self.calls.append(call.method)
                result = tagged(self.results.get(call.method))
                self._send(EngineCoreOutputs(utility_output=UtilityOutput(call.call_id, result=result)))
            else:
                self._send(EngineCoreOutputs())
        self._context.destroy(linger=0)

    def _send(self, outputs):
        try:
            self._router.send_multipart([b"client-0", self._encoder.encode(outputs)])
        except zmq.ZMQError as error:
            # The gate may have closed while this was on its way.
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def say(self, *outputs, **more):
        self._say.append(EngineCoreOutputs(outputs=list(outputs), **more))

    def close(self):
        self._over = True
        self._thread.join()


class FrontEnd:
    """A link with a client at its end."""

    def __init__(self, endpoint, facts=FACTS, sender="tester"):
        self.lost: Future[EngineDeadError] = Future()
        self.folder = SocketFolder()
        address = self.folder.address("core")
        self.link = RemoteLink(endpoint, keys_for(endpoint), LinkHello(sender, facts), address, self.lost.set_result)
        self._encoder = Encoder()
        self._context = zmq.Context()
        self._socket = connect_dealer(self._context, address, 0)

    def wait(self, within_s=60):
        self.link.welcome.result(within_s)
        return self

    def send(self, kind, message):
        self._socket.send_multipart([kind.value, self._encoder.encode(message)])

    def receive(self) -> EngineCoreOutputs:
        assert self._socket.poll(60_000)
        return Decoder(EngineCoreOutputs, plain=True).decode(self._socket.recv())

    def hears_nothing(self, for_ms=300):
        return not self._socket.poll(for_ms)

    def call(self, method, *args, call_id=1):
        self.send(CALL, UtilityCall(call_id, method, [tagged(value) for value in args], {}))
        return self.receive().utility_output

    def close(self):
        self.link.close()
        self._context.destroy(linger=0)
        self.folder.remove()


def request(request_id, **more):
    fields = {
        "mm_features": None, "sampling_params": SamplingParams(), "pooling_params": None, "arrival_time": 0.0,
        "lora_request": None, "cache_salt": None, "data_parallel_rank": None,
    }  # fmt: skip
    return EngineCoreRequest(request_id, [1, 2], **{**fields, **more})


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.delenv("HARDPOINT_LINK_KEY", raising=False)
    for module, name, value in (
        (gate_module, "_TICK_MS", 20), (remote_link, "_TICK_MS", 20), (remote_link, "_HELLO_S", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return endpoint_of("127.0.0.1", free_port())


@pytest.fixture
def core():
    folder = SocketFolder()
    core = Core(folder.address("core"))
    core.address = folder.address("core")
    yield core
    core.close()
    folder.remove()


@pytest.fixture
def make(endpoint):
    """Makes front ends of the gate; they are closed at the end."""
    made = []

    def make(*args, **more):
        made.append(FrontEnd(endpoint, *args, **more))
        return made[-1]

    yield make
    for front_end in made:
        front_end.close()


@pytest.fixture
def gate(endpoint, core):
    gate = Gate(endpoint)
    gate.expect(FACTS)
    gate.open(Ready(num_gpu_blocks=7, supported_tasks=["generate"]), core.address)
    yield gate
    gate.close()
    gate.wait()


def test_messages_pass_both_ways_and_the_welcome_holds_the_facts(gate, core, make):
    front_end = make()
    ready = front_end.wait().link.welcome.result().ready
    assert (ready.num_gpu_blocks, ready.supported_tasks) == (7, ["generate"])
    front_end.send(ADD, request("one", client_index=5))
    assert wait_until(lambda: "one" in core.requests)
    assert (core.requests["one"].prompt_token_ids, core.requests["one"].client_index) == ([1, 2], 0)
    core.say(EngineCoreOutput("one", [3], new_logprobs=None))
    assert front_end.receive().outputs[0].new_token_ids == [3]
    core.results["get_request_counts"] = (1, [2], {"x": np.arange(3)})
    one, two, three = front_end.call("get_request_counts").result
    assert (one, two, three["x"].tolist()) == (1, [2], [0, 1, 2])


def test_a_front_end_waits_for_the_model_and_says_for_what(endpoint, core, make, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    caplog.set_level(logging.INFO, "hardpoint")
    early = make()
    assert wait_until(lambda: "nothing listens there yet" in caplog.text)
    gate = Gate(endpoint)
    try:
        assert wait_until(lambda: "it is starting" in caplog.text)
        gate.expect(FACTS)
        assert wait_until(lambda: "it is loading its model" in caplog.text)
        assert not early.link.welcome.done()
        gate.open(Ready(), core.address)
        early.wait()
    finally:
        gate.close()
    assert "told to stop" in early.lost.result(60).what


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (EngineFacts("1.1", "a-model", "config", "weights"), "the engine is Hardpoint 1.0, the front end 1.1"),
        (EngineFacts("1.0", "b-model", "other", "weights"), "another model: a-model, .* started for b-model"),
        (EngineFacts("1.0", "a-model", "config", "other"), "another model"),
        (EngineFacts("1.0", "a-model", "config", "weights", {"dtype": "x"}), "another value of --dtype"),
    ],
)
def test_a_front_end_of_another_engine_is_refused(gate, make, facts, why):
    with pytest.raises(StartError, match=why):
        make(facts).wait()


def test_a_front_end_with_another_key_is_refused(monkeypatch, endpoint, make):
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET)
    gate = Gate(endpoint)
    try:
        for other in (None, SECRET + " not"):
            monkeypatch.setenv("HARDPOINT_LINK_KEY", other) if other else monkeypatch.delenv("HARDPOINT_LINK_KEY")
            with pytest.raises(StartError, match="HARDPOINT_LINK_KEY is another"):
                make().wait()
    finally:
        gate.close()


def test_a_front_end_gives_up_where_nothing_listens(monkeypatch, make):
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "1")
    with pytest.raises(StartError, match="did not serve this front end in time: nothing listens there yet"):
        make().wait()


def test_a_second_front_end_waits_for_the_first_to_go_and_hears_nothing_of_it(gate, core, make):
    first = make(sender="first").wait()
    first.send(ADD, request("kept"))
    first.send(ADD, request("done"))
    first.send(ADD, request("given-up"))
    first.send(ABORT, ["given-up", "somebody-else's"])
    assert wait_until(lambda: core.aborted == ["given-up"])
    core.say(EngineCoreOutput("done", [1], finish_reason=FinishReason.STOP))
    first.receive()
    second = make(sender="second")
    time.sleep(0.3)
    assert not second.link.welcome.done()
    first.close()
    second.wait()
    assert core.aborted == ["given-up", "kept"]
    assert core.calls == ["resume_scheduler", "get_request_counts"]
    assert second.hears_nothing()
    assert second.call("is_sleeping") is not None


def test_a_second_front_end_is_told_who_is_in_its_way(monkeypatch, gate, make):
    monkeypatch.setattr("hardpoint.front_end.engine_search._BUSY_S", 0.5)
    make(sender="first").wait()
    with pytest.raises(StartError, match="is serving another front end, first"):
        make(sender="second").wait()


def test_a_silent_front_end_is_given_up_and_learns_of_it(monkeypatch, gate, core, make):
    front_end = make().wait()
    front_end.send(ADD, request("one"))
    assert wait_until(lambda: "one" in core.requests)
    monkeypatch.setattr(remote_link, "BEAT_S", 3600)
    monkeypatch.setattr(gate_module, "SILENCE_S", 0.5)
    assert wait_until(lambda: core.aborted == ["one"])
    assert "nothing was heard of it" in front_end.lost.result(60).what


def test_a_silent_engine_is_given_up(monkeypatch, gate, make):
    front_end = make().wait()
    monkeypatch.setattr(gate_module, "BEAT_S", 3600)
    monkeypatch.setattr(remote_link, "SILENCE_S", 0.5)
    assert "nothing was heard of it" in front_end.lost.result(60).what


def test_a_live_link_outlasts_silence(monkeypatch, gate, make):
    for module in (gate_module, remote_link):
        monkeypatch.setattr(module, "SILENCE_S", 2.0)
        monkeypatch.setattr(module, "BEAT_S", 0.1)
    front_end = make().wait()
    time.sleep(3)
    assert not front_end.lost.done()
    assert front_end.call("is_sleeping") is not None


def test_a_front_end_learns_why_its_engine_died(gate, make):
    front_end = make().wait()
    gate.engine_died(EngineDeadError("a worker was eaten", code="worker-died"))
    error = front_end.lost.result(60)
    assert (error.code, "a worker was eaten" in error.what) == ("worker-died", True)


def test_what_an_engine_has_made_comes_before_its_death(gate, core, make):
    front_end = make().wait()
    front_end.send(ADD, request("running"))
    assert wait_until(lambda: "running" in core.requests)
    for token in range(50):
        core.say(EngineCoreOutput("running", [token]))
    core.say(is_last=True)
    gate.engine_died(EngineDeadError("a worker was eaten", code="worker-died"))
    assert "a worker was eaten" in front_end.lost.result(60).what
    assert [front_end.receive().outputs[0].new_token_ids for _ in range(50)] == [[token] for token in range(50)]
    assert front_end.receive().is_last


def test_a_gate_drains_before_it_closes(gate, core, make):
    front_end = make().wait()
    front_end.send(ADD, request("running"))
    assert wait_until(lambda: "running" in core.requests)
    gate.stop(30)
    time.sleep(0.1)
    front_end.send(ADD, request("late"))
    late = front_end.receive().outputs[0]
    assert (late.request_id, late.error) == ("late", "the engine is shutting down")
    core.say(EngineCoreOutput("running", [9], finish_reason=FinishReason.STOP))
    assert front_end.receive().outputs[0].new_token_ids == [9]
    assert "told to stop" in front_end.lost.result(60).what
    gate.wait()


def test_calls_that_a_front_end_has_no_use_for_are_refused(gate, core, make):
    front_end = make().wait()
    for method in ("shutdown", "save_sharded_state", "step", "_secret", "apply_model"):
        assert "cannot be called" in front_end.call(method).failure_message
    for method in ("collective_rpc", "profile"):
        assert "without a secret" in front_end.call(method).failure_message
    assert core.calls == []
    assert front_end.call("reset_prefix_cache").failure_message is None


def test_worker_methods_can_be_called_by_name_with_a_secret_and_functions_cannot(monkeypatch, endpoint, core, make):
    monkeypatch.setenv("HARDPOINT_LINK_KEY", SECRET)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    gate = Gate(endpoint)
    try:
        gate.expect(FACTS)
        gate.open(Ready(), core.address)
        front_end = make().wait()
        core.results["collective_rpc"] = ["yes"]
        assert front_end.call("collective_rpc", "ok", None, (), {}).result == ["yes"]
        for odd in (lambda worker: 1, EngineFacts, FinishReason.STOP, EngineFacts("1"), {"x": [lambda: 1]}):
            answer = front_end.call("collective_rpc", odd, None, (), {})
            assert (answer.failure_type, core.calls) == ("CodecError", ["collective_rpc"])
            assert "cross between machines" in answer.failure_message
        # Nor does the answer bring one here.
        core.results["collective_rpc"] = [lambda: 1]
        assert "cross between machines" in front_end.call("collective_rpc", "ok").failure_message
        # Nor a request.
        front_end.send(ADD, request("odd", kv_hints=tagged(EngineFacts("1"))))
        assert "cross between machines" in front_end.receive().outputs[0].error
        assert core.requests == {}
    finally:
        gate.close()


def test_what_is_too_long_for_the_link_ends_one_request_and_no_more(monkeypatch, gate, core, make):
    for module in (session_module, remote_link):
        monkeypatch.setattr(module, "MAX_LINK_BYTES", 10_000)
    front_end = make().wait()
    front_end.send(ADD, request("long", cache_salt="x" * 20_000))
    assert "more than the link" in front_end.receive().outputs[0].error
    front_end.send(ADD, request("short"))
    assert wait_until(lambda: list(core.requests) == ["short"])
    core.say(EngineCoreOutput("short", [1] * 20_000))
    assert "more than the link" in front_end.receive().outputs[0].error
    assert wait_until(lambda: core.aborted == ["short"])
    core.results["get_ledger"] = "x" * 20_000
    assert "more than the link" in front_end.call("get_ledger").failure_message
    assert front_end.call("is_sleeping").failure_message is None


def test_noise_is_ignored(gate, endpoint, make):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(endpoint.address)
    try:
        for frames in (
            [b""],
            [b"\x10", b"\xff"],
            [b"\x15", b"\x00", b"x"],
            [b"\x99", b"y"],
            [b"a"] * 9,
            [b"\x14", b""],
        ):
            stranger.send_multipart(frames)
        front_end = make(sender="a\nb\x1b[0m" * 200).wait()
        front_end.send(ADD, "not a request")
        front_end.send(ABORT, 7)
        assert front_end.call("is_sleeping").failure_message is None
    finally:
        context.destroy(linger=0)
