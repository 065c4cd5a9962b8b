"""The built-in worker on a tiny model, against transformers."""

import os
import threading
import time

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM
from worker_fakes import Driver, Job, greedy

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hardpoint.contracts.worker import WorkerWrapperBase
from hardpoint.errors import ConfigError
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.device_worker import set_threads
from hardpoint.worker.kernels import plain
from hardpoint.worker.kernels.library import kernels

BLOCK = 4
BLOCKS = 200
LENGTHS = [1, 3, 17, 40, 90]


def plan_of(specs):
    """One tensor per layer, blocks side by side."""
    tensors = [
        KVCacheTensor(
            size=spec.page_size_bytes * BLOCKS, layers=[name], layer_stride=0, block_stride=spec.page_size_bytes
        )
        for name, spec in specs.items()
    ]
    group = KVCacheGroupSpec(layer_names=list(specs), kv_cache_spec=next(iter(specs.values())))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])


@pytest.fixture(scope="module")
def worker(tiny_llama):
    config = EngineArgs(
        model=str(tiny_llama), dtype="float32", max_model_len=256, max_num_seqs=4, block_size=BLOCK,
        kv_cache_memory_bytes=1 << 20,
    ).create_engine_config()  # fmt: skip
    wrapper = WorkerWrapperBase()
    wrapper.init_worker(
        [{"vllm_config": config, "local_rank": 0, "rank": 0, "distributed_init_method": "", "is_driver_worker": True}]
    )
    wrapper.init_device()
    wrapper.load_model()
    wrapper.initialize_from_config([plan_of(wrapper.get_kv_cache_spec())])
    wrapper.compile_or_warm_up_model()
    return wrapper


@pytest.fixture(scope="module")
def reference(tiny_llama):
    return LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def prompts():
    generator = np.random.default_rng(5)
    return [generator.integers(3, 440, length).tolist() for length in LENGTHS]


def expected_of(reference, prompt, count):
    """Greedy continuation and the log-probabilities of each of its places."""
    tokens, scores = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits = reference(torch.tensor([tokens])).logits[0, -1]
            scores.append(logits.log_softmax(-1).numpy())
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], scores


def drive(worker, seed, **how):
    return Driver(worker, seed, slots=4, block_size=BLOCK, num_blocks=BLOCKS, **how)


def test_greedy_output_is_that_of_transformers(worker, reference):
    jobs = [Job(f"r{i}", prompt, greedy(max_tokens=12, logprobs=3)) for i, prompt in enumerate(prompts())]
    drive(worker, 1, chunk=1000, unrest=0).run(*jobs)
    for job in jobs:
        tokens, scores = expected_of(reference, job.prompt, 12)
        assert job.output == tokens
        for (ids, values), row in zip(job.logprobs, scores, strict=True):
            np.testing.assert_allclose(values, row[ids], atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_chunks_batches_and_preemption_do_not_change_the_output(worker, reference, seed):
    jobs = [Job(f"s{seed}-{i}", prompt, greedy(max_tokens=8)) for i, prompt in enumerate(prompts())]
    drive(worker, seed, chunk=[3, 7, 16, 50][seed]).run(*jobs)
    for job in jobs:
        assert job.output == expected_of(reference, job.prompt, 8)[0]
    assert not worker.model_runner.requests.states


def test_seeded_output_is_the_same_alone_and_in_company(worker):
    def make(name):
        params = SamplingParams(seed=11, temperature=1.2, top_p=0.9, max_tokens=15)
        return Job(name, prompts()[2], params)

    (alone,) = drive(worker, 0, chunk=1000, unrest=0).run(make("alone"))
    company = [Job(f"c{i}", prompt, SamplingParams(max_tokens=12)) for i, prompt in enumerate(prompts())]
    shared, *_ = drive(worker, 3, chunk=6).run(make("shared"), *company)
    assert shared.output == alone.output


def test_prompt_logprobs_are_those_of_transformers(worker, reference):
    prompt = prompts()[4]
    (job,) = drive(worker, 2, chunk=20).run(Job("p", prompt, greedy(prompt_logprobs=2, max_tokens=1)))
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1).numpy()
    ids, values, *_ = job.prompt_logprobs
    assert ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(values, np.take_along_axis(rows, ids.astype(np.int64), -1), atol=1e-4)


def test_the_worker_answers_for_its_model(worker):
    assert worker.get_supported_tasks() == ("generate",)
    assert worker.determine_available_memory() == 1 << 20
    assert worker.model_config.dtype is torch.float32
    assert worker.apply_model(lambda model: type(model).__name__) == "LlamaForCausalLM"
    assert worker.list_loras() == set()
    assert worker.check_health() is None
    sums = worker.compute_weight_checksums()
    assert sums == worker.compute_weight_checksums()
    with torch.no_grad():
        weight = worker.get_model().model.norm.weight
        weight[0] += 1
        changed = worker.compute_weight_checksums()
        weight[0] -= 1
    assert [name for name in sums if sums[name] != changed[name]] == ["model.norm.weight"]


@pytest.fixture
def threads():
    before, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, cores)


def test_threads_are_shared_or_given(worker, monkeypatch, threads):
    config = worker.vllm_config
    monkeypatch.setattr(config.device_config, "cpu_threads", 1)
    assert set_threads(config, 0) == torch.get_num_threads() == 1
    monkeypatch.setattr(config.device_config, "cpu_threads", None)
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"99999|{core}")
    assert set_threads(config, 1) == 1
    assert os.sched_getaffinity(0) == {core}


def test_kernels_compute_on_the_cores_that_were_named(worker, monkeypatch, threads):
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    monkeypatch.setattr(worker.vllm_config.device_config, "cpu_threads", None)
    library = kernels()
    assert library is not None
    before = library.threads
    known = {int(task) for task in os.listdir("/proc/self/task")}
    try:
        # Made anew, so that its threads are those that are bound here.
        library.set_threads(1)
        assert set_threads(worker.vllm_config, 0) == library.threads == len(cores)
        plain.linear(torch.randn(64, 64), torch.randn(64, 64))
        own = threading.get_native_id()
        started = {int(task) for task in os.listdir("/proc/self/task")} - known
        assert os.sched_getaffinity(own) == {cores[0]}
        # Each thread binds itself once it runs.
        deadline = time.monotonic() + 20
        while any({core} not in map(os.sched_getaffinity, started) for core in cores[1:]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        library.set_threads(before)


@pytest.mark.parametrize("text", ["0-x", "99999", "3-1", "0|", "all"])
def test_core_lists_that_make_no_sense_are_refused(worker, monkeypatch, threads, text):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", text)
    with pytest.raises(ConfigError, match="VLLM_CPU_OMP_THREADS_BIND"):
        set_threads(worker.vllm_config, 1)
