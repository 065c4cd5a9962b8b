"""TORCH_SDPA, FLEX_ATTENTION and TRITON_ATTN against attention written out, and how the platform chooses among them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.attention_backend import AttentionSelectorConfig, CommonAttentionMetadata
from hardpoint.contracts.kv_cache import FullAttentionSpec
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.testing import engine_here
from hardpoint.types.sampling_params import SamplingParams

NAMES = ["TORCH_SDPA", "FLEX_ATTENTION", "TRITON_ATTN"]
BLOCK, HEAD, HEADS, KV_HEADS = 6, 20, 6, 2
# Tokens of each sequence, and how many of them are in the step.
SEQUENCES = [(23, 23), (14, 5), (30, 1)]
SLOPES = [0.5, 0.25, 0.125, 1.0, 0.75, 0.3]
CASES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "soft cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])},
    "all": {"sliding_window": 9, "alibi_slopes": SLOPES},
}
UNABLE = {("TORCH_SDPA", "soft cap"), ("TORCH_SDPA", "sinks"), ("FLEX_ATTENTION", "sinks")}


def definition(query, key, value, causal, sliding_window=None, logits_soft_cap=None, alibi_slopes=None, sinks=None):
    """The last `len(query)` tokens of a sequence, one number after the other, in float64."""
    out = torch.zeros(len(query), HEADS, HEAD, dtype=torch.float64)
    computed = len(key) - len(query)
    for row, head in itertools.product(range(len(query)), range(HEADS)):
        place, scores, seen = computed + row, [], []
        for other in range(len(key)):
            if (causal and other > place) or (sliding_window and place - other >= sliding_window):
                continue
            score = float(query[row, head].double() @ key[other, head // 3].double()) * 0.3
            if logits_soft_cap:
                score = logits_soft_cap * math.tanh(score / logits_soft_cap)
            scores.append(score - (alibi_slopes[head] * (place - other) if alibi_slopes else 0.0))
            seen.append(other)
        extra = [float(sinks[head])] if sinks is not None else []
        weights = torch.tensor(scores + extra, dtype=torch.float64).softmax(0)[: len(seen)]
        out[row, head] = weights @ value[seen, head // 3].double()
    return out


def compute(name, causal, **options):
    """(found, expected) over scattered blocks; a padding row and a slot that is not to be kept come last."""
    cls = registry("attention_backends").load(name)
    generator = torch.Generator().manual_seed(1)
    parts = [
        [torch.randn(length, count, HEAD, generator=generator) for length, _ in SEQUENCES]
        for count in (HEADS, KV_HEADS, KV_HEADS)
    ]
    blocks = [[5, 2, 9, 7], [1, 8, 3], [4, 6, 10, 12, 11]]
    cache = torch.full(cls.get_kv_cache_shape(13, BLOCK, KV_HEADS, HEAD), float("nan"))
    starts = torch.tensor([0, *itertools.accumulate(count for _, count in SEQUENCES)], dtype=torch.int32)
    table = torch.zeros(len(SEQUENCES), 5, dtype=torch.int32)
    slots = []
    for row, ((length, count), own) in enumerate(zip(SEQUENCES, blocks, strict=True)):
        table[row, : len(own)] = torch.tensor(own)
        at = [own[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        slots += at[length - count :]
        for p in range(length - count):
            for side in (0, 1):
                cache[side, at[p] // BLOCK, at[p] % BLOCK] = parts[1 + side][row][p]
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([length for length, _ in SEQUENCES], dtype=torch.int32),
        num_reqs=len(SEQUENCES),
        num_actual_tokens=int(starts[-1]),
        max_query_len=23,
        max_seq_len=30,
        block_table_tensor=table,
        slot_mapping=torch.tensor([*slots, -1]),
        causal=causal,
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD, dtype="float32")
    metadata = cls.get_builder_cls()(spec, ["layer"], VllmConfig, torch.device("cpu")).build(0, common)
    impl = cls.get_impl_cls()(HEADS, HEAD, 0.3, KV_HEADS, **options)
    rows = [
        torch.cat([*(x[len(x) - n :] for x, (_, n) in zip(part, SEQUENCES, strict=True)), torch.ones_like(part[0][:1])])
        for part in parts
    ]
    output = torch.full_like(rows[0], float("nan"))
    with torch.inference_mode():
        impl.forward(None, *rows, cache, metadata, output=output)
    expected = [
        definition(q[len(q) - n :], k, v, causal, **options) for q, k, v, (_, n) in zip(*parts, SEQUENCES, strict=True)
    ]
    return output, torch.cat([*expected, torch.zeros(1, HEADS, HEAD)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_the_definition_or_says_that_it_cannot(name, case):
    if (name, case) in UNABLE:
        with pytest.raises(ConfigError, match=f"{name} does not support (capped scores|attention sinks)"):
            compute(name, True, **CASES[case])
        return
    found, expected = compute(name, True, **CASES[case])
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_queries_may_see_what_comes_after_them(name):
    found, expected = compute(name, False)
    assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_profiling_run_gives_zeros(name):
    impl = registry("attention_backends").load(name).get_impl_cls()(2, 8, 1.0)
    output = torch.full((3, 2, 8), float("nan"))
    impl.forward(None, output, output, output, torch.empty(0), None, output=output)
    assert not output.any()


def logprobs_of(**arguments):
    prompts = [{"prompt_token_ids": list(range(3, 40))}, {"prompt_token_ids": [7]}]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=5)
    with engine_here(**arguments) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        (kind,) = {type(layer.impl).__name__ for layer in layers_of(llm)}
    steps = [step for output in outputs for step in output.logprobs]
    return kind, [{token: entry.logprob for token, entry in step.items()} for step in steps]


def layers_of(llm):
    return [m for m in llm.apply_model(lambda model: list(model.modules()))[0] if hasattr(m, "impl")]


def test_a_model_says_the_same_with_each():
    kind, reference = logprobs_of()
    assert kind == "CPUAttentionImpl"
    kinds = set()
    for name in NAMES:
        kind, found = logprobs_of(attention_backend=name)
        kinds.add(kind)
        for step, wanted in zip(found, reference, strict=True):
            assert step == pytest.approx(wanted, abs=1e-4)
    assert kinds == {"TorchSDPAImpl", "FlexAttentionImpl", "TritonAttentionImpl"}


def facts(**changes):
    given = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16, **changes}
    return AttentionSelectorConfig(**given)


def test_the_named_backend_is_refused_with_all_its_reasons():
    with pytest.raises(ConfigError) as refused:
        CpuPlatform.get_attn_backend_cls("TORCH_SDPA", facts(kv_cache_dtype="int8_per_token_head", has_sink=True))
    text = str(refused.value)
    assert "TORCH_SDPA cannot be used on cpu" in text
    assert "KV cache dtype int8_per_token_head is not supported; attention sinks are not supported" in text


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch):
    assert CpuPlatform.get_attn_backend_cls("TRITON_ATTN", facts()).endswith(".TritonAttentionBackend")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        CpuPlatform.get_attn_backend_cls("TRITON_ATTN", facts())


def test_the_first_that_can_compute_the_layer_is_chosen_and_none_is_an_error():
    assert CpuPlatform.get_attn_backend_cls(None, facts()).endswith(".CPUAttentionBackend")
    with pytest.raises(ConfigError, match=r"CPU_ATTN: latent attention .*TORCH_SDPA: latent attention"):
        CpuPlatform.get_attn_backend_cls(None, facts(use_mla=True))


def test_the_flag_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "torch_sdpa")
    assert logprobs_of()[0] == "TorchSDPAImpl"
    assert logprobs_of(attention_backend="FLEX_ATTENTION")[0] == "FlexAttentionImpl"
