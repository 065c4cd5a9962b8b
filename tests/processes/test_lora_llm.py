"""Adapters from a script: with the engine in a process of its own, and with two tensor-parallel ranks."""

from __future__ import annotations

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ModelFileError, VLLMValidationError
from hardpoint.types.lora_request import LoRARequest
from lora_adapters import write_adapter

PROMPT = {"prompt_token_ids": list(range(20, 60))}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_llama, tmp_path_factory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, number, str(write_adapter(tiny_llama, folder / name, number, std=0.3)))
        for number, name in enumerate("ab", 1)
    ]


def run(model, adapters, **options) -> tuple[LLM, list[list[int]]]:
    """The tokens of a batch without an adapter, with the first and with the second, twice."""
    llm = LLM(
        model=str(model), dtype="float32", max_model_len=128, num_gpu_blocks_override=64, enable_lora=True, max_loras=2,
        **options,
    )  # fmt: skip
    outputs = llm.generate([PROMPT] * 6, GREEDY, use_tqdm=False, lora_request=[None, *adapters] * 2)
    assert [one.lora_request and one.lora_request.lora_name for one in outputs] == [None, "a", "b"] * 2
    return llm, [list(one.outputs[0].token_ids) for one in outputs]


@pytest.fixture(scope="module")
def expected(tiny_llama, adapters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        _, tokens = run(tiny_llama, adapters)
    assert tokens[:3] == tokens[3:]
    assert len({tuple(one) for one in tokens}) == 3
    return tokens


def test_two_ranks_give_the_tokens_of_one(tiny_llama, adapters, expected, tmp_path):
    llm, tokens = run(tiny_llama, adapters, tensor_parallel_size=2)
    assert tokens == expected
    engine = llm.llm_engine
    assert engine.list_loras() == {1, 2}
    assert llm.collective_rpc("list_loras") == [{1, 2}] * 2
    broken = write_adapter(tiny_llama, tmp_path / "broken", rank=32)
    with pytest.raises(ModelFileError, match="--max-lora-rank 32"):
        engine.add_lora(LoRARequest("broken", 3, str(broken)))
    wanted = [LoRARequest("c", 3, str(broken)), None]
    failed, good = (one.outputs[0] for one in llm.generate([PROMPT] * 2, GREEDY, use_tqdm=False, lora_request=wanted))
    assert failed.finish_reason == "error"
    assert "rank 32 is more than" in failed.stop_reason
    assert good.token_ids == expected[0]
    with pytest.raises(VLLMValidationError, match="neither a folder nor"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=LoRARequest("d", 4, str(tmp_path / "absent")))
    assert engine.list_loras() == {1, 2}
    assert engine.remove_lora(1)
    assert llm.collective_rpc("list_loras") == [{2}] * 2
    assert engine.pin_lora(2)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected[0]
