"""Paged attention in the kernels, on every instruction set, held against attention written out in double precision."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hardpoint.contracts.attention_backend import CommonAttentionMetadata
from hardpoint.contracts.kv_cache import FullAttentionSpec
from hardpoint.worker.attention.cpu import CPUAttentionBackend, CPUAttentionImpl, CPUAttentionMetadataBuilder
from hardpoint.worker.attention.storage import CACHE_DTYPES, cache_shape

ISAS = ("avx512", "avx2", "generic")
# How far results may be off, by how keys and values are stored.
TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2, "int8_per_token_head": 6e-2}


@pytest.fixture(params=ISAS)
def isa(request, library):
    """Each instruction set of this processor; one that it lacks is the generic one."""
    library.use_isa(request.param if request.param in library.isas else "generic")
    return library


def dense(query, key, value, first, *, window=0, soft_cap=0.0, slopes=None, sinks=None, causal=True):
    """[n, heads, size] queries from position `first` on, [tokens, kv_heads, size] keys and values."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("nhd,thd->hnt", query.double(), key) * query.shape[-1] ** -0.5
    if soft_cap:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    distance = torch.arange(first, first + len(query))[:, None] - torch.arange(len(key))
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden = (distance < 0) | ((distance >= window) if window else hidden)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hnt,thd->nhd", weights, value).float()


class Paged:
    """Sequences whose keys and values lie in scattered blocks; what nobody wrote is NaN."""

    def __init__(self, lengths, heads, kv_heads, size, block, store="float32", seed=0, **options):
        generator = torch.Generator().manual_seed(seed)
        rand = lambda length, count: torch.randn(length, count, size, generator=generator)  # noqa: E731
        self.query, self.key, self.value = (
            [rand(length, count) for length in lengths] for count in (heads, kv_heads, kv_heads)
        )
        self.lengths, self.block = lengths, block
        per_request = -(-max(lengths) // block)
        shuffled = torch.randperm(len(lengths) * per_request, generator=generator) + 1
        self.blocks = shuffled.view(len(lengths), per_request).int()
        shape = cache_shape(len(lengths) * per_request + 1, block, kv_heads, size, store)
        order = CPUAttentionBackend.get_kv_cache_stride_order()
        memory = torch.full([shape[dim] for dim in order], 127 if store.startswith("int8") else float("nan"))
        memory = memory.to(CACHE_DTYPES[store])
        if store.startswith("int8"):
            memory.fill_(-1)  # as factors: NaN
        self.cache = memory.permute([order.index(dim) for dim in range(len(order))])
        self.impl = CPUAttentionImpl(heads, size, size**-0.5, kv_heads, kv_cache_dtype=store, **options)
        spec = FullAttentionSpec(block_size=block, num_kv_heads=kv_heads, head_size=size, dtype="float32")
        self.builder = CPUAttentionMetadataBuilder(spec, ["layer"], SimpleNamespace(), torch.device("cpu"))

    def run(self, spans, causal=True):
        """[(sequence, first, past the last)] -> [tokens, heads, size] of each."""
        counts = [end - start for _, start, end in spans]
        starts = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
        places = [torch.arange(start, end) for _, start, end in spans]
        slots = [
            self.blocks[i][place // self.block] * self.block + place % self.block
            for (i, *_), place in zip(spans, places, strict=True)
        ]
        rows = [
            torch.cat([part[i][start:end] for i, start, end in spans]) for part in (self.query, self.key, self.value)
        ]
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts,
            seq_lens=torch.tensor([end for *_, end in spans], dtype=torch.int32), num_reqs=len(spans),
            num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=max(end for *_, end in spans),
            block_table_tensor=self.blocks[[i for i, *_ in spans]], slot_mapping=torch.cat(slots).long(), causal=causal,
        )  # fmt: skip
        output = torch.full_like(rows[0], 7.0)
        self.impl.forward(SimpleNamespace(), *rows, self.cache, self.builder.build(0, common), output)
        return output.split(counts)


def random_case(pick):
    kv_heads, group = int(pick.integers(1, 4)), int(pick.choice([1, 2, 3, 4, 7, 9, 16]))
    lengths = [int(n) for n in pick.integers(1, 420, int(pick.integers(1, 5)))]
    heads = kv_heads * group
    options = {
        "sliding_window": int(pick.choice([1, 5, 100, 300])) if pick.random() < 0.4 else None,
        "logits_soft_cap": 20.0 if pick.random() < 0.3 else None,
        "alibi_slopes": pick.uniform(0, 0.3, heads).tolist() if pick.random() < 0.3 else None,
        "sinks": torch.tensor(pick.normal(size=heads), dtype=torch.float32) if pick.random() < 0.3 else None,
    }
    size, block = int(pick.choice([8, 20, 32, 64, 80, 128])), int(pick.choice([4, 8, 16, 20, 32]))
    return lengths, heads, kv_heads, size, block, options


@pytest.mark.parametrize("store", TOLERANCES)
def test_any_shape_agrees_with_dense_attention(isa, store):
    pick = np.random.default_rng(3)
    for trial in range(12):
        lengths, heads, kv_heads, size, block, options = random_case(pick)
        causal = pick.random() < 0.8
        paged = Paged(lengths, heads, kv_heads, size, block, store, seed=trial, **options)
        done = [int(pick.integers(0, length)) for length in lengths]
        before = [(i, 0, end) for i, end in enumerate(done) if end]
        if before:
            paged.run(before, causal)
        found = paged.run([(i, start, paged.lengths[i]) for i, start in enumerate(done)], causal)
        slopes = options["alibi_slopes"]
        for i, rows in enumerate(found):
            wanted = dense(
                paged.query[i][done[i] :], paged.key[i], paged.value[i], done[i], causal=causal,
                window=options["sliding_window"] or 0, soft_cap=options["logits_soft_cap"] or 0.0,
                slopes=None if slopes is None else torch.tensor(slopes), sinks=options["sinks"],
            )  # fmt: skip
            torch.testing.assert_close(rows, wanted, atol=TOLERANCES[store], rtol=1e-3)


@pytest.mark.parametrize("store", TOLERANCES)
def test_torch_reads_and_writes_the_same_cache(library, store):
    kernel, torch_ = (Paged([70, 33], 6, 2, 32, 8, store) for _ in range(2))
    torch_.impl.library = None
    spans = [(0, 0, 69), (1, 0, 32)]
    for mine, other in zip(kernel.run(spans), torch_.run(spans), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-3 if store != "float32" else 1e-5, rtol=1e-3)
    # What the one wrote the other reads.
    kernel.cache, torch_.cache = torch_.cache, kernel.cache
    last = [(0, 69, 70), (1, 32, 33)]
    for mine, other in zip(kernel.run(last), torch_.run(last), strict=True):
        torch.testing.assert_close(mine, other, atol=2e-3 if store != "float32" else 1e-5, rtol=1e-3)


@pytest.mark.parametrize("store", ["float32", "float16", "int8_per_token_head"])
@pytest.mark.parametrize("window", [None, 150])
def test_company_chunks_and_threads_change_no_bit(isa, store, window):
    lengths = [1000, 1, 130, 257]

    def results(cut, threads):
        isa.set_threads(threads)
        paged = Paged(lengths, 6, 2, 32, 16, store, sliding_window=window)
        found = [[] for _ in lengths]
        for spans in cut:
            for (i, *_), rows in zip(spans, paged.run(spans), strict=True):
                found[i].append(rows)
        return [torch.cat(rows) for rows in found]

    whole = [[(i, 0, length)] for i, length in enumerate(lengths)]
    together = [[(i, 0, length) for i, length in enumerate(lengths)]]
    chunks = [[(0, start, min(1000, start + 37))] for start in range(0, 1000, 37)]
    chunks += [[(2, 0, 129), (3, 0, 250), (1, 0, 1)], *[[(3, n, n + 1)] for n in range(250, 257)], [(2, 129, 130)]]
    wanted = results(whole, 1)
    for cut, threads in ((whole, 4), (together, 1), (together, 3), (chunks, 2)):
        for mine, other in zip(results(cut, threads), wanted, strict=True):
            assert torch.equal(mine, other)


def test_what_is_not_finite_stays_with_who_sees_it(isa):
    paged = Paged([40, 40], 4, 2, 32, 16)
    paged.key[0][20, 0, 3] = float("nan")
    paged.value[0][30, 1, 5] = float("inf")
    poisoned, sound = paged.run([(0, 0, 40), (1, 0, 40)])
    assert sound.isfinite().all()
    assert poisoned[:20].isfinite().all()
    assert poisoned[20:, :2].isnan().all()
    assert poisoned[20:30, 2:].isfinite().all()
    assert not poisoned[30:, 2:, 5].isfinite().any()


def test_large_scores_do_not_overflow(isa):
    paged = Paged([300], 2, 1, 32, 16)
    paged.query[0] *= 1e3
    found = paged.run([(0, 0, 300)])[0]
    torch.testing.assert_close(found, dense(paged.query[0], paged.key[0], paged.value[0], 0), atol=2e-3, rtol=1e-3)


def test_slots_below_zero_are_not_written(library):
    paged = Paged([4], 1, 1, 16, 4)
    before = paged.cache.clone()
    metadata = SimpleNamespace(**{"num_actual_tokens": 4, "causal": True})
    starts, lengths = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    common = CommonAttentionMetadata(
        starts, starts, lengths, 1, 4, 4, 4, paged.blocks, torch.full((4,), -1, dtype=torch.int64)
    )
    metadata = paged.builder.build(0, common)
    out = torch.empty(4, 1, 16)
    paged.impl.forward(SimpleNamespace(), paged.query[0], paged.key[0], paged.value[0], paged.cache, metadata, out)
    assert torch.equal(before.nan_to_num(), paged.cache.nan_to_num())
