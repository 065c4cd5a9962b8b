"""Linear layers and embeddings on one rank, and that the parts of several ranks make the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig
from hardpoint.worker.distributed import parallel_state
from hardpoint.worker.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from hardpoint.worker.models.loading import load_parameter

IN, OUT = 12, 16


class Rank:
    """A tensor-parallel group seen from one of its ranks, without the others."""

    def __init__(self, rank, size):
        self.rank_in_group, self.world_size = rank, size


def on_rank(monkeypatch, rank, size, build):
    """Build a layer as rank `rank` of `size` would."""
    with monkeypatch.context() as patch:
        patch.setitem(parallel_state._groups, "tp", Rank(rank, size))
        return build()


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def fill(layer, weight, bias=None, shard=None):
    load_parameter(layer.weight, weight, shard)
    if bias is not None:
        load_parameter(layer.bias, bias, shard)


# One rank


def test_what_a_call_gives():
    x, weight, bias = rand(5, IN), rand(OUT, IN), rand(OUT)
    for cls in (ReplicatedLinear, ColumnParallelLinear, RowParallelLinear):
        layer = cls(IN, OUT)
        fill(layer, weight, bias)
        out, left = layer(x)
        torch.testing.assert_close(out, F.linear(x, weight, bias))
        assert left is None
        layer = cls(IN, OUT, skip_bias_add=True)
        fill(layer, weight, bias)
        out, left = layer(x)
        torch.testing.assert_close(out, F.linear(x, weight))
        assert left is layer.bias
        layer = cls(IN, OUT, bias=False, return_bias=False)
        fill(layer, weight)
        torch.testing.assert_close(layer(x), F.linear(x, weight))
        assert layer.bias is None


def test_weights_have_the_type_asked_for():
    assert ColumnParallelLinear(IN, OUT).weight.dtype == torch.float32
    assert ColumnParallelLinear(IN, OUT, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert not ColumnParallelLinear(IN, OUT).weight.requires_grad


def test_a_sum_over_ranks_must_not_add_the_bias_twice():
    with pytest.raises(ValueError, match="bias"):
        RowParallelLinear(IN, OUT, reduce_results=False)
    RowParallelLinear(IN, OUT, reduce_results=False, skip_bias_add=True)


@pytest.mark.parametrize(
    ("layer", "weight", "shard"),
    [
        (lambda: ReplicatedLinear(IN, OUT), (OUT + 1, IN), None),
        (lambda: ColumnParallelLinear(IN, OUT), (2 * OUT, IN), None),
        (lambda: ColumnParallelLinear(IN, OUT), (OUT, IN + 1), None),
        (lambda: RowParallelLinear(IN, OUT), (OUT, 2 * IN), None),
        (lambda: MergedColumnParallelLinear(IN, [8, 4]), (4, IN), 0),
        (lambda: MergedColumnParallelLinear(IN, [8, 4]), (13, IN), None),
        (lambda: QKVParallelLinear(IN, 4, 4, 2), (17, IN), "q"),
        (lambda: QKVParallelLinear(IN, 4, 4, 2), (16, IN), "k"),
        (lambda: QKVParallelLinear(IN, 4, 4, 2), (33, IN), None),
        (lambda: VocabParallelEmbedding(10, IN), (11, IN), None),
        (lambda: VocabParallelEmbedding(10, IN), (10, IN + 1), None),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(layer, weight, shard):
    with pytest.raises(ValueError, match="shape"):
        load_parameter(layer().weight, torch.zeros(weight), shard)


def test_fused_layers_take_their_parts_and_the_whole():
    parts = [rand(8, IN), rand(4, IN), rand(6, IN)]
    by_part, whole, pairs = (MergedColumnParallelLinear(IN, [8, 4, 6], bias=False) for _ in range(3))
    for index, part in enumerate(parts):
        load_parameter(by_part.weight, part, index)
    load_parameter(whole.weight, torch.cat(parts))
    load_parameter(pairs.weight, torch.cat(parts[:2]), (0, 1))
    load_parameter(pairs.weight, parts[2], (2,))
    for layer in (by_part, whole, pairs):
        assert torch.equal(layer.weight, torch.cat(parts))
    q, k, v = rand(16, IN), rand(8, IN) + 1, rand(8, IN) + 2
    by_part, whole = (QKVParallelLinear(IN, 4, 4, 2, bias=False) for _ in range(2))
    for name, part in {"v": v, "q": q, "k": k}.items():
        load_parameter(by_part.weight, part, name)
    load_parameter(whole.weight, torch.cat([q, k, v]))
    assert torch.equal(by_part.weight, torch.cat([q, k, v]))
    assert torch.equal(whole.weight, torch.cat([q, k, v]))


# Several ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_the_ranks_make_the_whole(size, monkeypatch):
    x, weight, bias = rand(5, IN), rand(OUT, IN), rand(OUT)
    whole = F.linear(x, weight, bias)
    columns, rows = [], 0
    for rank in range(size):
        column = on_rank(monkeypatch, rank, size, lambda: ColumnParallelLinear(IN, OUT))
        assert column.weight.shape == (OUT // size, IN)
        fill(column, weight, bias)
        columns.append(column(x)[0])
        row = on_rank(monkeypatch, rank, size, lambda: RowParallelLinear(IN, OUT))
        assert row.weight.shape == (OUT, IN // size)
        fill(row, weight, bias)
        row.reduce_results = False
        rows = rows + row(x.chunk(size, -1)[rank])[0]
    torch.testing.assert_close(torch.cat(columns, -1), whole)
    torch.testing.assert_close(rows, whole)


@pytest.mark.parametrize("size", [1, 2])
def test_fused_layers_are_split_part_by_part(size, monkeypatch):
    x, parts = rand(5, IN), [rand(8, IN), rand(4, IN)]
    outs = []
    for rank in range(size):
        layer = on_rank(monkeypatch, rank, size, lambda: MergedColumnParallelLinear(IN, [8, 4], bias=False))
        for index, part in enumerate(parts):
            load_parameter(layer.weight, part, index)
        outs.append(layer(x)[0].split([8 // size, 4 // size], -1))
    for index, part in enumerate(parts):
        torch.testing.assert_close(torch.cat([out[index] for out in outs], -1), F.linear(x, part))


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (8, 2), (4, 1)])
def test_heads_go_to_ranks_and_few_heads_to_several(size, kv_heads, monkeypatch):
    heads, head = 8, 4
    x, q, k, v = rand(5, IN), rand(heads * head, IN), rand(kv_heads * head, IN), rand(kv_heads * head, IN) + 1
    whole_q, whole_k = F.linear(x, q).view(5, heads, head), F.linear(x, k).view(5, kv_heads, head)
    for rank in range(size):
        layer = on_rank(monkeypatch, rank, size, lambda: QKVParallelLinear(IN, head, heads, kv_heads, bias=False))
        for name, part in {"q": q, "k": k, "v": v}.items():
            load_parameter(layer.weight, part, name)
        out_q, out_k, _ = layer(x)[0].split(layer.output_partition_sizes, -1)
        mine = range(rank * heads // size, (rank + 1) * heads // size)
        torch.testing.assert_close(out_q.view(5, -1, head), whole_q[:, list(mine)])
        # Each query head finds its own key head on its rank.
        needed = sorted({query_head // (heads // kv_heads) for query_head in mine})
        torch.testing.assert_close(out_k.view(5, -1, head), whole_k[:, needed])


def test_sizes_that_cannot_be_split_are_refused(monkeypatch):
    for build in (lambda: ColumnParallelLinear(IN, 15), lambda: QKVParallelLinear(IN, 4, 3)):
        with pytest.raises(AssertionError, match="equal parts"):
            on_rank(monkeypatch, 0, 2, build)
    assert on_rank(monkeypatch, 1, 2, lambda: ColumnParallelLinear(IN, OUT, disable_tp=True)).weight.shape == (OUT, IN)


# Embeddings


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("vocab", [64, 100, 300])
def test_embeddings_and_logits_of_the_ranks_make_the_whole(size, vocab, monkeypatch):
    weight, ids, hidden = rand(vocab, IN), torch.randint(0, vocab, (20,)), rand(3, IN)
    summed, logits = 0, []
    for rank in range(size):
        embedding = on_rank(monkeypatch, rank, size, lambda: VocabParallelEmbedding(vocab, IN, reduce_results=False))
        head = on_rank(monkeypatch, rank, size, lambda: ParallelLMHead(vocab, IN))
        assert embedding.weight.shape[0] * size == -(-vocab // 64) * 64
        for layer in (embedding, head):
            layer.weight.data.fill_(float("nan"))
            load_parameter(layer.weight, weight)
        summed = summed + embedding(ids)
        logits.append(LogitsProcessor(vocab)(head, hidden, skip_gather=True))
    torch.testing.assert_close(summed, F.embedding(ids, weight))
    torch.testing.assert_close(torch.cat(logits, -1)[:, :vocab], F.linear(hidden, weight))
    assert (torch.cat(logits, -1)[:, vocab:] == 0).all()


@pytest.mark.parametrize("size", [1, 2])
def test_added_tokens_follow_the_checkpoints(size, monkeypatch):
    weight, added = rand(70, IN), rand(5, IN)
    ids, summed = torch.arange(75), 0
    for rank in range(size):
        layer = on_rank(
            monkeypatch, rank, size, lambda: VocabParallelEmbedding(75, IN, org_num_embeddings=70, reduce_results=False)
        )
        load_parameter(layer.weight, weight)
        shard = layer.shard
        own = layer.weight.data[shard.own_rows : shard.own_rows + shard.added_end - shard.added_start]
        own.copy_(added[shard.added_start : shard.added_end])
        summed = summed + layer(ids)
    torch.testing.assert_close(summed, torch.cat([weight, added]))


def test_heads_are_tied_and_never_called():
    embedding, head = VocabParallelEmbedding(70, IN), ParallelLMHead(70, IN)
    load_parameter(embedding.weight, rand(70, IN))
    tied = head.tie_weights(embedding)
    assert tied.weight is embedding.weight
    with pytest.raises(RuntimeError, match="LogitsProcessor"):
        head(torch.zeros(1, IN))


def test_logits_are_cut_capped_scaled_and_biased():
    head = ParallelLMHead(70, IN, bias=True)
    load_parameter(head.weight, rand(70, IN))
    head.bias.data.fill_(0.5)
    hidden = rand(3, IN)
    plain = F.linear(hidden, rand(70, IN)) + 0.5
    torch.testing.assert_close(LogitsProcessor(70)(head, hidden), plain)
    torch.testing.assert_close(LogitsProcessor(70, 60)(head, hidden), plain[:, :60])
    capped = LogitsProcessor(70, scale=2.0, soft_cap=3.0)(head, hidden)
    torch.testing.assert_close(capped, torch.tanh(plain / 3) * 6)
    assert LogitsProcessor(70, logits_as_input=True)(head, plain) is plain


# Quantisation methods


class Doubling(LinearMethodBase):
    def create_weights(self, layer, input_size, output_sizes, *sizes, params_dtype, **extra):
        weight = nn.Parameter(torch.zeros(sum(output_sizes), input_size), requires_grad=False)
        weight.weight_loader = extra["weight_loader"]
        layer.register_parameter("weight", weight)

    def apply(self, layer, x, bias=None):
        return 2 * F.linear(x, layer.weight, bias)


class DoublingConfig(QuantizationConfig):
    def __init__(self, method):
        super().__init__()
        self.method, self.asked = method, []

    def get_name(self):
        return "doubling"

    def get_supported_act_dtypes(self):
        return [torch.float32]

    @classmethod
    def get_min_capability(cls):
        return -1

    @staticmethod
    def get_config_filenames():
        return []

    @classmethod
    def from_config(cls, config):
        return cls(Doubling())

    def get_quant_method(self, layer, prefix):
        self.asked.append((type(layer), prefix))
        return self.method


def test_the_quantisation_settings_choose_the_method():
    class Method(Doubling):
        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
                           params_dtype, **extra):  # fmt: skip
            super().create_weights(
                layer, input_size_per_partition, output_partition_sizes, params_dtype=params_dtype, **extra
            )

    config = DoublingConfig(Method())
    layer = ColumnParallelLinear(IN, OUT, bias=False, quant_config=config, prefix="a.b")
    load_parameter(layer.weight, rand(OUT, IN))
    torch.testing.assert_close(layer(rand(2, IN))[0], 2 * F.linear(rand(2, IN), rand(OUT, IN)))
    assert config.asked == [(ColumnParallelLinear, "a.b")]


def test_a_linear_layer_without_a_method_is_refused():
    with pytest.raises(ValueError, match=r"All linear layers should support quant method.*'a\.b'"):
        ColumnParallelLinear(IN, OUT, quant_config=DoublingConfig(None), prefix="a.b")


def test_methods_may_bring_parameters_that_load_themselves():
    @register_weight_loader_v2_supported_method
    class SelfLoading(Doubling):
        def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
                           params_dtype, **extra):  # fmt: skip
            assert extra["weight_loader"] == layer.weight_loader_v2

            class Recorder(nn.Parameter):
                def load_column_parallel_weight(self, loaded_weight):
                    self.loaded = loaded_weight

                def load_merged_column_weight(self, **how):
                    self.loaded = how

                def load_qkv_weight(self, **how):
                    self.loaded = how

            layer.weight = Recorder(torch.zeros(1), requires_grad=False)
            layer.weight.weight_loader = extra["weight_loader"]

    config = DoublingConfig(SelfLoading())
    column = ColumnParallelLinear(IN, OUT, bias=False, quant_config=config)
    load_parameter(column.weight, rand(3))
    assert torch.equal(column.weight.loaded, rand(3))
    merged = MergedColumnParallelLinear(IN, [8, 4], bias=False, quant_config=config)
    load_parameter(merged.weight, rand(3), 1)
    assert (merged.weight.loaded["shard_offset"], merged.weight.loaded["shard_size"]) == (8, 4)
    qkv = QKVParallelLinear(IN, 4, 4, 2, bias=False, quant_config=config)
    load_parameter(qkv.weight, rand(3), "v")
    assert (qkv.weight.loaded["shard_offset"], qkv.weight.loaded["shard_size"]) == (24, 8)


def test_every_linear_layer_is_one_kind():
    for cls in (
        ReplicatedLinear,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    ):
        assert issubclass(cls, LinearBase)
