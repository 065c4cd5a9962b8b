"""Attention over scattered blocks, held against attention written out over whole sequences."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from hardpoint.contracts.attention_backend import AttentionType, CommonAttentionMetadata
from hardpoint.contracts.kv_cache import FullAttentionSpec
from hardpoint.errors import ConfigError
from hardpoint.worker.attention import plan
from hardpoint.worker.attention.cpu import CPUAttentionBackend, CPUAttentionImpl, CPUAttentionMetadataBuilder

BLOCK, BLOCKS, HEAD = 8, 64, 16


def dense(query, key, value, scale, window=None, soft_cap=None, slopes=None, causal=True):
    """[tokens, heads, head] queries, [tokens, kv_heads, head] keys and values -> [tokens, heads, head]."""
    count, heads, _ = query.shape
    out = torch.empty_like(query)
    for head in range(heads):
        kv_head = head // (heads // key.shape[1])
        for row in range(count):
            first = 0 if window is None else max(0, row - window + 1)
            last = row + 1 if causal else count
            scores = (key[first:last, kv_head].double() @ query[row, head].double()) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores + slopes[head] * (torch.arange(first, last) - row)
            weights = scores.softmax(0)
            out[row, head] = (weights @ value[first:last, kv_head].double()).to(out.dtype)
    return out


class Sequences:
    """Random sequences and a cache; `run` computes some of their tokens."""

    def __init__(self, lengths, heads=4, kv_heads=2, dtype=torch.float32, cache_dtype=None, seed=0, **impl):
        generator = torch.Generator().manual_seed(seed)

        def rand(length, count):
            return torch.randn(length, count, HEAD, generator=generator).to(dtype)

        self.query = [rand(length, heads) for length in lengths]
        self.key = [rand(length, kv_heads) for length in lengths]
        self.value = [rand(length, kv_heads) for length in lengths]
        self.scale = HEAD**-0.5
        self.impl = CPUAttentionImpl(heads, HEAD, self.scale, kv_heads, **impl)
        shape = CPUAttentionBackend.get_kv_cache_shape(BLOCKS, BLOCK, kv_heads, HEAD)
        order = CPUAttentionBackend.get_kv_cache_stride_order()
        memory = torch.full([shape[dim] for dim in order], float("nan"), dtype=cache_dtype or dtype)
        self.cache = memory.permute([order.index(dim) for dim in range(len(order))])
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=HEAD, dtype="float32")
        self.builder = CPUAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))
        free = list(range(1, BLOCKS))
        random.Random(seed).shuffle(free)
        self.blocks = [[free.pop() for _ in range(-(-length // BLOCK))] for length in lengths]

    def run(self, spans, padding=0, causal=True):
        """spans: sequence -> (first, past the last) token; returns the same keys with [tokens, heads, head]."""
        counts = [end - start for start, end in spans.values()]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        width = max(len(self.blocks[i]) for i in spans)
        table = torch.zeros(len(spans), width, dtype=torch.int32)
        slots = []
        for row, (i, (start, end)) in enumerate(spans.items()):
            table[row, : len(self.blocks[i])] = torch.tensor(self.blocks[i])
            slots += [self.blocks[i][p // BLOCK] * BLOCK + p % BLOCK for p in range(start, end)]
        rows = [torch.cat([part[i][s:e] for i, (s, e) in spans.items()]) for part in (self.query, self.key, self.value)]
        if padding:
            rows = [
                torch.cat([row, torch.full((padding, *row.shape[1:]), float("nan"), dtype=row.dtype)]) for row in rows
            ]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([end for _, end in spans.values()], dtype=torch.int32),
            num_reqs=len(spans),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(end for _, end in spans.values()),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
            causal=causal,
        )
        output = torch.full_like(rows[0], 7.0)
        metadata = self.builder.build(0, common)
        layer = SimpleNamespace(layer_name="layer", kv_cache=self.cache)
        self.impl.forward(layer, *rows, self.cache, metadata, output)
        assert (output[sum(counts) :] == 0).all()
        return dict(zip(spans, output[: sum(counts)].split(counts), strict=True))

    def expected(self, i, **settings):
        return dense(self.query[i], self.key[i], self.value[i], self.scale, **settings)


SETTINGS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 11}, {"window": 11}),
    "window of one": ({"sliding_window": 1}, {"window": 1}),
    "soft cap": ({"logits_soft_cap": 0.7}, {"soft_cap": 0.7}),
    "alibi": ({"alibi_slopes": [0.5, 0.25, 0.125, 0.06]}, {"slopes": [0.5, 0.25, 0.125, 0.06]}),
    "all": (
        {"sliding_window": 9, "logits_soft_cap": 1.1, "alibi_slopes": [0.5, 0.25, 0.125, 0.06]},
        {"window": 9, "soft_cap": 1.1, "slopes": [0.5, 0.25, 0.125, 0.06]},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_any_way_of_cutting_gives_dense_attention(name, seed, monkeypatch):
    monkeypatch.setattr(plan, "MAX_MASKED_QUERIES", 13)
    options, reference = SETTINGS[name]
    pick = random.Random(seed)
    lengths = [pick.choice([1, 2, 7, 8, 9, 16, 30, 57]) for _ in range(6)]
    sequences = Sequences(lengths, seed=seed, **options)
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while done != lengths:
        going = [i for i in range(len(lengths)) if done[i] < lengths[i] and pick.random() < 0.6]
        if not going:
            continue
        pick.shuffle(going)
        spans = {i: (done[i], min(lengths[i], done[i] + pick.choice([1, 1, 4, 20, 40]))) for i in going}
        for i, rows in sequences.run(spans, padding=pick.choice([0, 2])).items():
            found[i].append(rows)
            done[i] = spans[i][1]
    for i, rows in enumerate(found):
        torch.testing.assert_close(torch.cat(rows), sequences.expected(i, **reference), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_heads_share_keys_in_order(heads, kv_heads):
    sequences = Sequences([20], heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(sequences.run({0: (0, 20)})[0], sequences.expected(0), atol=1e-5, rtol=1e-4)


def test_what_others_do_changes_no_bit():
    together, alone = Sequences([30, 17, 41]), Sequences([30, 17, 41])
    for i, length in enumerate([30, 17, 41]):
        alone.run({i: (0, length - 1)})
    together.run({0: (0, 29), 1: (0, 16), 2: (0, 40)}, padding=3)
    found = together.run({2: (40, 41), 0: (29, 30), 1: (16, 17)})
    for i, length in enumerate([30, 17, 41]):
        assert torch.equal(found[i], alone.run({i: (length - 1, length)})[i])


def test_attention_in_both_directions():
    sequences = Sequences([19])
    found = sequences.run({0: (0, 19)}, causal=False)[0]
    torch.testing.assert_close(found, sequences.expected(0, causal=False), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    sequences = Sequences([25], dtype=dtype)
    torch.testing.assert_close(
        sequences.run({0: (0, 25)})[0].float(), sequences.expected(0).float(), atol=0.03, rtol=0.03
    )


def test_a_cache_of_another_type():
    sequences = Sequences([25], cache_dtype=torch.bfloat16, kv_cache_dtype="bfloat16")
    torch.testing.assert_close(sequences.run({0: (0, 25)})[0], sequences.expected(0), atol=0.03, rtol=0.03)


def test_a_layer_that_shares_a_cache_writes_nothing():
    sequences = Sequences([10])
    sequences.run({0: (0, 10)})
    before = sequences.cache.clone()
    sharing = CPUAttentionImpl(4, HEAD, sequences.scale, 2, kv_sharing_target_layer_name="other")
    sequences.impl, sequences.key, sequences.value = sharing, [torch.zeros(10, 2, HEAD)], [torch.zeros(10, 2, HEAD)]
    found = sequences.run({0: (0, 10)})[0]
    assert torch.equal(before.nan_to_num(), sequences.cache.nan_to_num())
    assert found.abs().sum() > 1


def test_a_profiling_run_gives_zeros():
    output = torch.full((3, 4, HEAD), 5.0)
    rows = [torch.randn(3, heads, HEAD) for heads in (4, 2, 2)]
    CPUAttentionImpl(4, HEAD, 1.0, 2).forward(None, *rows, torch.empty(0), None, output)
    assert (output == 0).all()


def test_requests_without_tokens_are_passed_over():
    pieces = plan.cut([0, 0, 3, 3], [5, 3, 0], torch.tensor([[1], [2], [3]]), BLOCK, None, True)
    assert [(piece.start, piece.end, piece.keys) for piece in pieces] == [(0, 3, 3)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"use_alibi_sqrt": True}, "square root"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"indexer": object()}, "indexer"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(options, name):
    with pytest.raises(ConfigError, match=name):
        CPUAttentionImpl(4, HEAD, 1.0, 2, **options)


def test_the_backend_states_its_limits():
    fine = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "block_size": 16}
    assert CPUAttentionBackend.validate_configuration(**fine, has_sliding_window=True) == []
    reasons = CPUAttentionBackend.validate_configuration(
        **{**fine, "dtype": torch.float64, "kv_cache_dtype": "fp8"}, use_mla=True
    )
    assert len(reasons) == 3
    assert any("float64" in reason for reason in reasons)
