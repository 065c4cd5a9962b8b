"""Requests with LoRA adapters in an engine: mixed, with less room than adapters, with cached prefixes, with errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny_ggufs
import torch

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreOutput, EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from lora_adapters import write_adapter

PROMPT = list(range(20, 70))
NAMES = "abcd"


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(tiny_llama, folder / name, seed, std=0.3)
    return folder


def engine(model: Path, **options) -> EngineCore:
    config = EngineArgs(
        model=str(model), max_model_len=128, block_size=16, max_num_seqs=16, num_gpu_blocks_override=200,
        enable_lora=True, **{"dtype": "float32", **options},
    ).create_engine_config()  # fmt: skip
    return EngineCore(config, Executor.get_class(config), log_stats=True)


@pytest.fixture(scope="module")
def core(tiny_llama):
    """At most two adapters in a step, at most three in memory."""
    core = engine(tiny_llama, max_loras=2, max_cpu_loras=3)
    yield core
    core.shutdown()


@pytest.fixture(autouse=True)
def empty(core):
    yield
    core.abort_requests(list(core.scheduler.requests))
    while core.has_work():
        core.step()
    for adapter in core.list_loras():
        core.remove_lora(adapter)
    core.reset_prefix_cache()


def adapter(folder: Path, name: str, **more) -> LoRARequest:
    return LoRARequest(name, NAMES.index(name) + 1, str(folder / name), **more)


def add(core: EngineCore, request_id: str, wanted: LoRARequest | None, tokens: int = 6, **params) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, **params)
    core.add_request(
        EngineCoreRequest(
            request_id=request_id, prompt_token_ids=PROMPT, mm_features=None, sampling_params=params,
            pooling_params=None, arrival_time=0.0, lora_request=wanted, cache_salt=None, data_parallel_rank=None,
        )
    )  # fmt: skip


def finish(core: EngineCore, watch=lambda plan: None) -> dict[str, list[EngineCoreOutput]]:
    """Step until nothing is left; outputs by request."""
    found: dict[str, list[EngineCoreOutput]] = {}
    while core.has_work():
        for batch in core.step()[0].values():
            watch(batch)
            for output in batch.outputs:
                found.setdefault(output.request_id, []).append(output)
    return found


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def alone(core: EngineCore, wanted: LoRARequest | None) -> list[int]:
    add(core, "alone", wanted)
    return tokens(finish(core)["alone"])


def test_more_adapters_than_room_take_turns_and_none_changes_another(core, folder, monkeypatch):
    wanted = [None, *(adapter(folder, name) for name in NAMES)]
    expected = [alone(core, one) for one in wanted]
    assert len({tuple(one) for one in expected}) == 5
    in_a_step, in_memory = [], []
    schedule = core.scheduler.schedule

    def watched():
        plan = schedule()
        running = [core.scheduler.requests[name].lora_request for name in plan.num_scheduled_tokens]
        in_a_step.append(len({one.lora_int_id for one in running if one}))
        in_memory.append(len(core.list_loras()))
        return plan

    monkeypatch.setattr(core.scheduler, "schedule", watched)
    for number in range(15):
        add(core, f"r{number}", wanted[number % 5])
    found = finish(core)
    for number in range(15):
        assert tokens(found[f"r{number}"]) == expected[number % 5]
    assert max(in_a_step) == 2
    assert max(in_memory) == 3


def test_the_adapter_used_longest_ago_goes_first_and_pinned_ones_stay(core, folder):
    for name in "abc":
        assert core.add_lora(adapter(folder, name))
    assert not core.add_lora(adapter(folder, "a"))
    assert core.add_lora(adapter(folder, "d"))
    assert core.list_loras() == {1, 3, 4} == core.model_executor.list_loras()
    assert core.pin_lora(3)
    alone(core, adapter(folder, "b"))
    alone(core, adapter(folder, "a"))
    assert 3 in core.list_loras()
    assert not core.pin_lora(9)
    core.pin_lora(1)
    with pytest.raises(ConfigError, match="all but one of 3 places are pinned"):
        core.pin_lora(2)


def test_an_adapter_in_use_is_neither_dropped_nor_removed(core, folder):
    for name in "abc":
        add(core, name, adapter(folder, name), tokens=40)
    core.step()
    with pytest.raises(ConfigError, match="'a' is in use"):
        core.remove_lora(1)
    # There is no room: it is found to be sound, and not kept.
    assert core.add_lora(adapter(folder, "d"))
    assert core.list_loras() == {1, 2, 3}
    add(core, "d", adapter(folder, "d"))
    assert core.get_request_counts() == (2, 2)
    core.abort_requests(["d"])
    found = finish(core)
    assert sorted(found) == ["a", "b", "c"]
    assert core.remove_lora(1)
    assert not core.remove_lora(1)


def test_whoever_waits_for_room_is_not_overtaken_for_ever(core, folder):
    ended: list[str] = []
    for name in "abc":
        add(core, name, adapter(folder, name), tokens=4)
    add(core, "d", adapter(folder, "d"), tokens=4)
    for step in range(200):
        add(core, f"a{step}", adapter(folder, "a"), tokens=4)
        for batch in core.step()[0].values():
            ended += [output.request_id for output in batch.outputs if output.finished]
        if "d" in ended:
            break
    assert "d" in ended


def test_a_request_passed_over_for_its_adapter_comes_to_its_turn(core, folder):
    ended: list[str] = []
    add(core, "b", adapter(folder, "b"), tokens=60)
    for step in range(120):
        add(core, f"a{step}", adapter(folder, "a"), tokens=8)
        if step == 1:
            add(core, "c", adapter(folder, "c"), tokens=2)
        for batch in core.step()[0].values():
            ended += [output.request_id for output in batch.outputs if output.finished]
    assert "c" in ended
    assert ended.index("c") < ended.index("a60")


def test_cached_blocks_are_those_of_the_adapter(core, folder):
    def cached(wanted) -> int:
        add(core, "again", wanted, tokens=1)
        return finish(core)["again"][0].prefill_stats.num_cached_tokens

    for wanted in (None, adapter(folder, "a"), adapter(folder, "b")):
        assert cached(wanted) == 0
        assert cached(wanted) == 48


def test_a_replaced_adapter_does_not_find_what_the_old_one_cached(core, folder, tmp_path):
    before, other = alone(core, adapter(folder, "a")), alone(core, adapter(folder, "b"))
    assert not core.add_lora(LoRARequest("a", 1, str(folder / "b"), load_inplace=True))
    assert alone(core, LoRARequest("a", 1, str(folder / "b"))) == other != before
    core.remove_lora(1)
    # Other weights in the same place, too.
    shutil.copytree(folder / "a", tmp_path / "x")
    assert alone(core, LoRARequest("x", 9, str(tmp_path / "x"))) == before
    core.remove_lora(9)
    shutil.copytree(folder / "b", tmp_path / "x", dirs_exist_ok=True)
    assert alone(core, LoRARequest("x", 9, str(tmp_path / "x"))) == other
    core.remove_lora(9)


def test_an_adapter_that_cannot_be_loaded_is_its_requests_own_error(core, folder, tmp_path):
    expected = alone(core, adapter(folder, "a"))
    add(core, "good", adapter(folder, "a"))
    add(core, "bad", LoRARequest("bad", 9, str(tmp_path / "nowhere")))
    add(core, "taken", LoRARequest("b", 1, str(folder / "b")))
    add(core, "base", None)
    found = finish(core)
    assert tokens(found["good"]) == expected
    assert len(tokens(found["base"])) == 6
    [bad], [taken] = found["bad"], found["taken"]
    assert (bad.finish_reason, bad.refused_parameter) == (bad.finish_reason.ERROR, "lora_request")
    assert "adapter_config.json is not there" in bad.error
    assert str(tmp_path) not in bad.error
    assert "lora_int_id 1 belongs to adapter 'a'" in taken.error
    with pytest.raises(ModelFileError, match="is not there"):
        core.add_lora(LoRARequest("bad", 9, str(tmp_path / "nowhere")))
    assert core.list_loras() == {1}


def test_statistics_tell_which_adapters_run_and_wait(core, folder):
    seen = []
    for name in "abcd":
        add(core, name, adapter(folder, name))
    finish(core, lambda batch: seen.append(batch.scheduler_stats) if batch.scheduler_stats else None)
    assert seen[0].running_lora_adapters == {"a": 1, "b": 1}
    assert seen[0].waiting_lora_adapters == {"c": 1, "d": 1}
    assert seen[0].num_waiting_reqs == 2


def test_prompt_logprobs_are_those_of_the_adapter(core, folder):
    def scores(requests: dict[str, LoRARequest | None]) -> dict[str, list[float]]:
        for name, wanted in requests.items():
            add(core, name, wanted, tokens=1, prompt_logprobs=0)
        found = finish(core)
        return {name: found[name][0].new_prompt_logprobs_tensors.logprobs[:, 0].tolist() for name in requests}

    wanted = {"none": None, "a": adapter(folder, "a"), "b": adapter(folder, "b")}
    together = scores(wanted)
    for name, one in wanted.items():
        assert together[name] == pytest.approx(scores({name: one})[name], abs=1e-4)
    assert together["a"] != pytest.approx(together["none"], abs=0.1)


def test_adapters_are_refused_where_there_are_none(tiny_llama, folder):
    config = EngineArgs(model=str(tiny_llama), max_model_len=64, num_gpu_blocks_override=20).create_engine_config()
    plain = EngineCore(config, Executor.get_class(config), log_stats=False)
    try:
        add(plain, "r", adapter(folder, "a"))
        assert "without adapters" in finish(plain)["r"][0].error
        for call in (
            lambda: plain.add_lora(adapter(folder, "a")),
            lambda: plain.remove_lora(1),
            lambda: plain.pin_lora(1),
        ):
            with pytest.raises(ConfigError, match="start with --enable-lora"):
                call()
        assert plain.list_loras() == set()
    finally:
        plain.shutdown()


def test_a_quantised_model_leaves_its_program_for_steps_with_adapters_only(tmp_path):
    """Who has no adapter gets the same bits, whoever shares the step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "m")
    tiny_ggufs.write(base, "llama", tmp_path / "m.gguf", "Q8_0")
    write_adapter(tmp_path / "m", tmp_path / "a", std=0.3)
    core = engine(tmp_path / "m.gguf", dtype="auto", skip_tokenizer_init=True, enable_prefix_caching=False)
    try:
        program = core.model_executor.driver_worker.worker.model_runner._program
        used, current = [], program.current
        program.current = lambda: used.append(current()) or used[-1]
        add(core, "alone", None)
        expected = finish(core)["alone"]
        assert len(used) == 6
        assert None not in used
        add(core, "base", None)
        add(core, "adapted", adapter(tmp_path, "a"))
        found = finish(core)
        assert len(used) == 6
        scores = [[output.new_logprobs.logprobs.tolist() for output in one] for one in (expected, found["base"])]
        assert scores[0] == scores[1]
        assert tokens(found["adapted"]) != tokens(found["base"])
    finally:
        core.shutdown()
