"""Decoding steps replayed from tensors that stay: with a stand-in for device graphs, beside the same steps as ever."""

from __future__ import annotations

import pytest
import torch

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams

# Prompt length and tokens to answer of each request: batches of three, of two and of one.
REQUESTS = ((5, 9), (20, 6), (33, 3))


class Replayed:
    """Repeats what was captured, in whose inputs only the tensors may have changed; notes for how many requests."""

    def __init__(self):
        self.sizes, self.replays = [], []

    def __call__(self, run):
        with torch.inference_mode():
            out = run().clone()
        size = len(out)
        self.sizes.append(size)

        def replay():
            self.replays.append(size)
            out.copy_(run())

        return replay, out


@pytest.fixture
def make_core(tiny_llama):
    cores = []

    def make(backend="TRITON_ATTN", sizes=(), capture=None):
        config = EngineArgs(
            model=str(tiny_llama),
            attention_backend=backend,
            max_model_len=64,
            max_num_seqs=8,
            kv_cache_memory_bytes=4 << 20,
            dtype="float32",
        ).create_engine_config()
        cores.append(EngineCore(config, Executor.get_class(config), False))
        if sizes:
            config.compilation_config.cudagraph_capture_sizes = list(sizes)
            cores[-1].model_executor.driver_worker.worker.model_runner.capture_graphs(capture)
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def generate(core):
    for number, (length, tokens) in enumerate(REQUESTS):
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompt = list(range(10 + number, 10 + number + length))
        core.add_request(EngineCoreRequest(str(number), prompt, None, params, None, 0.0, None, None, None))
    found = {}
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


def test_replayed_steps_give_the_same_tokens(make_core):
    expected = generate(make_core())
    capture = Replayed()
    assert generate(make_core(sizes=(1, 2, 4), capture=capture)) == expected
    assert capture.sizes == [4, 2, 1], "the largest first"
    # Each prompt gives its first token by itself or beside others, outside of graphs.
    assert [size for size in capture.replays if size == 4], "three requests are filled up to four"
    assert capture.replays == sorted(capture.replays, reverse=True)
    assert set(capture.replays) == {4, 2, 1}


def test_steps_without_a_graph_run_as_ever(make_core):
    expected = generate(make_core())
    capture = Replayed()
    assert generate(make_core(sizes=(1,), capture=capture)) == expected
    assert set(capture.replays) == {1}


def test_a_backend_that_cannot_be_replayed_is_refused(make_core):
    with pytest.raises(ConfigError, match="cannot be replayed from one") as caught:
        make_core("TORCH_SDPA", sizes=(1,), capture=Replayed())
    assert "TRITON_ATTN" in caught.value.fix
