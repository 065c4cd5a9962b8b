"""Whole engines on models of several kinds: chunked prompts, cached prefixes and company change no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_checkpoints import BASE, build, save

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams

WINDOW = {"head_dim": 16, "sliding_window": 24}
EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows on all layers": ("MistralConfig", {**BASE, **WINDOW}),
    "windows on some layers": (
        "Gemma3TextConfig",
        {**BASE, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "experts": ("Qwen3MoeConfig", {**BASE, **EXPERTS}),
    "run by transformers": ("GraniteConfig", BASE),
}
ANSWER = 12
# Positions where the two best tokens are closer than this may go either way.
MARGIN = 1e-3


def request_of(name: str, prompt: list[int]) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, mm_features=None, sampling_params=params, pooling_params=None,
        arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, priority=0,
    )  # fmt: skip


def answers(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        core.add_request(request_of(name, prompt))
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                found[output.request_id] += output.new_token_ids
    return found


def expected(model: Any, prompt: list[int]) -> tuple[list[int], int]:
    """What transformers answers, and how many of these tokens are sure."""
    tokens, sure = list(prompt), None
    for place in range(ANSWER):
        with torch.no_grad():
            best = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
        if sure is None and float(best.values[0] - best.values[1]) < MARGIN:
            sure = place
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], ANSWER if sure is None else sure


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_answers_as_transformers(name, tmp_path):
    model = build(*MODELS[name])
    config = EngineArgs(
        model=str(save(model, tmp_path)), dtype="float32", skip_tokenizer_init=True, max_model_len=128, block_size=16,
        max_num_batched_tokens=32, max_num_seqs=4, num_gpu_blocks_override=40,
    ).create_engine_config()  # fmt: skip
    core = EngineCore(config, Executor.get_class(config), False)
    assert len(core.kv_cache_config.kv_cache_groups) == (2 if name == "windows on some layers" else 1)
    try:
        first = random.Random(8).choices(range(3, 320), k=70)
        other = [*first[:48], *random.Random(9).choices(range(3, 320), k=20)]
        found = answers(core, {"first": first})
        # Of these prompts, blocks are in the cache by now.
        found |= answers(core, {"again": first, "other": other, "short": first[:5]})
    finally:
        core.shutdown()
    for request, prompt in {"first": first, "again": first, "other": other, "short": first[:5]}.items():
        tokens, sure = expected(model, prompt)
        assert found[request][:sure] == tokens[:sure], request
        assert len(found[request]) == ANSWER
