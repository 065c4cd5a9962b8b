"""A model split over ranks in processes of their own computes what one worker does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.links.children import ExitStatus
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from process_tools import ended, wait_until

pytestmark = pytest.mark.server

# Two tokens closer than this are a matter of the order in which numbers are added.
CLOSE = 1e-3
Sequences = dict[str, list[tuple[int, float]]]


def make_core(model: Path, **arguments) -> EngineCore:
    given = {"max_model_len": 128, "kv_cache_memory_bytes": 32 << 20, "dtype": "float32", **arguments}
    config = EngineArgs(model=str(model), **given).create_engine_config()
    return EngineCore(config, Executor.get_class(config), False)


def request(number: int, tokens: int) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    return EngineCoreRequest(
        request_id=f"r{number}", prompt_token_ids=list(range(10, 24 + 9 * number)), mm_features=None,
        sampling_params=params, pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
        data_parallel_rank=None,
    )  # fmt: skip


def generate(core: EngineCore, tokens: int = 16, count: int = 3) -> Sequences:
    """Greedy tokens of some requests, each with how far ahead of the second best it was."""
    for number in range(count):
        core.add_request(request(number, tokens))
    found: Sequences = {}
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                assert output.error is None, output.error
                top = np.sort(output.new_logprobs.logprobs, axis=1)[:, ::-1] if output.new_token_ids else []
                found.setdefault(output.request_id, []).extend(
                    (token, float(row[0] - row[1])) for token, row in zip(output.new_token_ids, top, strict=True)
                )
    return found


def assert_same(found: Sequences, expected: Sequences) -> None:
    assert found.keys() == expected.keys()
    for name, sequence in expected.items():
        assert len(found[name]) == len(sequence)
        for (token, _), (right, margin) in zip(found[name], sequence, strict=True):
            if margin < CLOSE and token != right:
                break  # From here on they may be different texts.
            assert token == right


@pytest.fixture(scope="module")
def models(make_tiny_llama, smollm2_gguf):
    """Checkpoints whose heads can be split: by 2 and 4, by 3 (as the default model's), by 2 with shared heads."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 192}
    return {
        "8 heads": make_tiny_llama(num_attention_heads=8, num_key_value_heads=4, **sizes),
        "9 heads": make_tiny_llama(num_attention_heads=9, num_key_value_heads=3, vocab_size=449, **sizes),
        "4 heads, 1 shared": make_tiny_llama(num_attention_heads=4, num_key_value_heads=1, **sizes),
        "default": smollm2_gguf,
    }


@pytest.fixture(scope="module")
def alone(models):
    """What one worker says, by model."""
    known: dict[str, Sequences] = {}

    def ask(name: str, **arguments) -> Sequences:
        if name not in known:
            core = make_core(models[name], **arguments)
            known[name] = generate(core, tokens=6 if name == "default" else 16)
            core.shutdown()
        return known[name]

    return ask


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("9 heads", {"tensor_parallel_size": 3}),
        ("4 heads, 1 shared", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ],
    ids=["TP 3", "TP 2 x PP 2"],
)
def test_ranks_give_the_tokens_of_one_worker(models, alone, name, sizes):
    core = make_core(models[name], **sizes)
    try:
        assert_same(generate(core), alone(name))
        # Again, from cached prefixes.
        assert_same(generate(core), alone(name))
    finally:
        core.shutdown()


def test_stages_compute_different_steps_at_the_same_time(models, alone):
    core = make_core(models["8 heads"], pipeline_parallel_size=2, max_num_batched_tokens=32, max_num_seqs=8)
    executor, steps, at_once = core.model_executor, [], []
    execute = executor.execute_model

    def watched(plan, non_block=False):
        steps.append(execute(plan, non_block))
        at_once.append(sum(not step.done() for step in steps))
        return steps[-1]

    executor.execute_model = watched
    try:
        assert_same(generate(core), alone("8 heads"))
        assert max(at_once) == 2
        # The end in the middle of it: nobody is forced, nobody waits for one that has gone.
        for number in range(3):
            core.add_request(request(number, 64))
        core.step()
        assert core._in_flight
    finally:
        core.shutdown()
    assert [worker.child.status for worker in executor._workers] == [ExitStatus(code=0)] * 2


def test_the_default_model_is_split_over_three_ranks_in_the_kernels(models, alone):
    """Q4_1 blocks go to the ranks as they are stored. Rounded activations, so not the same bits as in float32."""
    expected = alone("default", dtype="auto")
    core = make_core(models["default"], dtype="auto", tensor_parallel_size=3)
    try:
        assert_same(generate(core, tokens=6), expected)
    finally:
        core.shutdown()


EXTENSION = '''
import os
import time

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"odd {one} {two}")

class Extension:
    def place(self):
        return self.rank, os.getpid()

    def threads(self):
        import torch
        return torch.get_num_threads()

    def held(self):
        """Elements of the parameters that this rank has."""
        return {name: parameter.numel() for name, parameter in self.get_model().named_parameters()}

    def sampled(self):
        return {name: list(state.output) for name, state in self.model_runner.requests.states.items()}

    def one_fails(self):
        if self.rank == 1:
            raise Odd("one", "two")
        time.sleep(3)

    def one_is_slow(self):
        if self.rank == 1:
            time.sleep(5)

    def one_is_weird(self):
        return (lambda: 1) if self.rank == 1 else 1
'''


@pytest.fixture(scope="module")
def two(models, tmp_path_factory):
    """Two tensor-parallel ranks with methods to call."""
    folder = tmp_path_factory.mktemp("extension")
    (folder / "extension_for_ranks.py").write_text(EXTENSION)
    sys.path.insert(0, str(folder))
    core = make_core(models["8 heads"], tensor_parallel_size=2, worker_extension_cls="extension_for_ranks.Extension")
    yield core
    core.shutdown()
    sys.path.remove(str(folder))


def test_each_rank_holds_its_part_only(two, models, alone):
    assert_same(generate(two), alone("8 heads"))
    whole = make_core(models["8 heads"])
    sizes = {
        name: parameter.numel()
        for name, parameter in whole.model_executor.driver_worker.worker.get_model().named_parameters()
    }
    whole.shutdown()
    first, second = two.collective_rpc("held")
    assert first.keys() == second.keys() == sizes.keys()
    for name, size in sizes.items():
        assert first[name] == second[name] == (size if "norm" in name else size // 2), name


def test_ranks_draw_the_same_random_tokens(two):
    """Each samples by itself; nothing tells one what the others drew."""
    for number in range(3):
        drawn = request(number, 40)
        drawn.sampling_params = SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True)
        two.add_request(drawn)
    for _ in range(12):
        two.step()
    first, second = two.collective_rpc("sampled")
    assert first == second
    assert all(len(tokens) > 5 for tokens in first.values())
    two.abort_requests([f"r{number}" for number in range(3)])
    while two.has_work():
        two.step()


def test_ranks_share_the_cores(two):
    cores = len(os.sched_getaffinity(0))
    assert all(threads <= max(1, cores // 2) for threads in two.collective_rpc("threads"))


@pytest.mark.parametrize(
    ("method", "timeout", "error", "text"),
    [
        ("one_fails", None, Exception, "Odd: odd one two"),
        ("one_is_weird", 10, Exception, "function cannot cross"),
        ("no_such_method", None, NotImplementedError, "'no_such_method' is not implemented"),
        ("one_is_slow", 0.5, TimeoutError, "did not finish within 0.5 s"),
    ],
)
def test_a_fault_of_one_rank_reaches_the_caller_at_once(two, method, timeout, error, text):
    """Bug B25 with two workers; the other one is not waited for."""
    with pytest.raises(error, match=text):
        two.collective_rpc(method, timeout)


def test_the_ledger_has_every_rank(two):
    places = two.collective_rpc("place")
    assert [rank for rank, _ in places] == [0, 1]
    assert {pid for _, pid in places} <= {entry["pid"] for entry in two.get_ledger() if entry["role"] == "worker"}


def test_a_rank_that_dies_takes_the_others_along(two):
    """The last test with these ranks. The one that is left waits for the other in vain."""
    pids = [pid for _, pid in two.collective_rpc("place")]
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: two.model_executor._lost is not None)
    with pytest.raises(EngineDeadError, match=r"worker 1 .* was killed by SIGKILL"):
        two.check_health()
    two.shutdown()
    assert all(ended(pid) for pid in pids)


@pytest.mark.parametrize(
    ("name", "ranks", "text"),
    [
        ("8 heads", 3, r"divide the 8 attention heads, the 4 key/value heads.* split over 1 or 2 or 4 or 8 ranks"),
        ("9 heads", 2, r"divide the 9 attention heads, the 3 key/value heads.* split over 1 or 3 ranks"),
        ("default", 2, r"divide the 9 attention heads.* split over 1 or 3 ranks"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(models, name, ranks, text):
    with pytest.raises(ConfigError, match=text):
        EngineArgs(model=str(models[name]), tensor_parallel_size=ranks).create_engine_config()


LAUNCHED = """
import json, sys
from hardpoint import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend="external_launcher",
          max_model_len=128, dtype="float32", kv_cache_memory_bytes=32 << 20)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print("ANSWER", json.dumps([list(o.outputs[0].token_ids) for o in llm.generate(sys.argv[2:], params)]))
"""
PROMPTS = ["A server answers", "Once upon a time there was"]


def launched(model: Path, rank: int, port: int) -> subprocess.Popen:
    """What torchrun does for one rank."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHED, str(model), *PROMPTS],
        env={**os.environ, **place, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_ranks_of_an_external_launcher_give_the_same_answers(models):
    from server_process import free_port

    port = free_port()
    ranks = [launched(models["8 heads"], rank, port) for rank in range(2)]
    outputs = [process.communicate(timeout=200) for process in ranks]
    answers = {line for out, _ in outputs for line in out.splitlines() if line.startswith("ANSWER")}
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert len(answers) == 1, outputs
