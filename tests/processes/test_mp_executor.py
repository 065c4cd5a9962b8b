"""The executor with workers in processes of their own, over a tiny model."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import EngineDeadError, HardpointError
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from process_tools import ended

EXTENSION = '''
import os
import time

class Custom(Exception):
    """Cannot be rebuilt elsewhere: it wants two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

class Extension:
    def pid(self):
        return os.getpid()

    def boom(self):
        raise Custom("one", "two")

    def lookup(self):
        raise LookupError("nothing there")

    def slow(self):
        time.sleep(30)

    def big(self):
        return b"x" * 50_000_000

    def weird(self):
        return lambda: None

class Clash:
    def load_model(self):
        pass

'''


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extension")
    (folder / "worker_extension_for_test.py").write_text(EXTENSION)
    sys.path.insert(0, str(folder))
    yield "worker_extension_for_test"
    sys.path.remove(str(folder))
    sys.modules.pop("worker_extension_for_test", None)


def make_core(model: Path, callback=None, **arguments) -> EngineCore:
    config = EngineArgs(
        model=str(model), max_model_len=128, kv_cache_memory_bytes=1 << 22, **arguments
    ).create_engine_config()
    return EngineCore(config, Executor.get_class(config), False, callback)


@pytest.fixture(scope="module")
def core(tiny_llama, extension):
    core = make_core(tiny_llama, distributed_executor_backend="mp", worker_extension_cls=f"{extension}.Extension")
    yield core
    core.shutdown()


def generate(core: EngineCore, count: int = 3, during=None) -> dict[str, list[int]]:
    for number in range(count):
        core.add_request(
            EngineCoreRequest(
                request_id=f"r{number}", prompt_token_ids=list(range(10, 30 + number)), mm_features=None,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), pooling_params=None,
                arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
            )
        )  # fmt: skip
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if during is not None:
            during, call = None, during
            call()
    return tokens


@pytest.mark.server
def test_a_worker_process_gives_the_tokens_of_one_inside(core, tiny_llama):
    assert core.collective_rpc("pid") != [os.getpid()]
    inside = make_core(tiny_llama, distributed_executor_backend="uni")
    try:
        assert generate(core) == generate(inside)
    finally:
        inside.shutdown()


@pytest.mark.server
@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("boom", HardpointError, "Custom: one and two"),
        ("lookup", LookupError, "nothing there"),
        ("weird", HardpointError, "function cannot cross"),
        ("no_such_method", NotImplementedError, "'no_such_method' is not implemented"),
    ],
)
def test_what_a_worker_raises_reaches_the_caller_and_the_worker_lives(core, method, error, text):
    for timeout in (None, 10):
        with pytest.raises(error, match=text):
            core.collective_rpc(method, timeout)
    assert len(generate(core)["r0"]) == 12


@pytest.mark.server
def test_big_answers_cross(core):
    assert core.collective_rpc("big", 60) == [b"x" * 50_000_000]


@pytest.mark.server
def test_a_slow_call_ends_at_its_limit_and_requests_go_on(core):
    def call() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            core.collective_rpc("slow", 0.5)
        assert time.monotonic() - began < 20

    assert {len(tokens) for tokens in generate(core, during=call).values()} == {12}


@pytest.mark.server
def test_a_killed_worker_is_reported_within_seconds(tiny_llama, extension):
    died = threading.Event()
    core = make_core(
        tiny_llama, died.set, distributed_executor_backend="mp", worker_extension_cls=f"{extension}.Extension"
    )
    try:
        (pid,) = core.collective_rpc("pid")
        os.kill(pid, signal.SIGKILL)
        assert died.wait(60)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            core.check_health()
        with pytest.raises(EngineDeadError):
            generate(core)
    finally:
        core.shutdown()
    assert ended(pid)


@pytest.mark.server
def test_shutdown_leaves_no_process(tiny_llama, extension):
    core = make_core(tiny_llama, distributed_executor_backend="mp", worker_extension_cls=f"{extension}.Extension")
    (pid,) = core.collective_rpc("pid")
    core.shutdown()
    assert ended(pid)


@pytest.mark.server
def test_what_stops_a_worker_at_the_start_is_named_and_the_others_end_without_a_word(tiny_llama, extension, caplog):
    with pytest.raises(HardpointError, match="load_model"):
        make_core(tiny_llama, tensor_parallel_size=2, worker_extension_cls=f"{extension}.Clash")
    assert "did not end" not in caplog.text
