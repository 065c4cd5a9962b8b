"""Every storage type on every instruction set, held against dequantised weights and plain torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType
from hardpoint.worker.kernels.packed import PackedLinear, PackedMatrix, PackedWeight
from hardpoint.worker.loaders.stored import StoredTensor
from hardpoint.worker.quantization.ggml import DECODERS, dequantize

KINDS = list(DECODERS)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
# Where float16 scales stand in a block.
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}


def stored(kind: GGMLType, rows: int, columns: int, seed: int = 0, scale: float = 0.1, order=None) -> StoredTensor:
    """A matrix of arbitrary blocks as a file holds it."""
    generator = np.random.default_rng(seed)
    numbers, size = BLOCK_SIZES[kind]
    if kind in FLOATS:
        values = torch.from_numpy(generator.normal(0, 1, (rows, columns)).astype(np.float32))
        types = {GGMLType.F32: torch.float32, GGMLType.F16: torch.float16, GGMLType.BF16: torch.bfloat16}
        raw = values.to(types[kind]).view(torch.uint8).numpy().reshape(rows, -1)
    else:
        blocks = generator.integers(0, 256, (rows * columns // numbers, size), dtype=np.uint8)
        for at in HALVES.get(kind.name, (0, 2)):
            halves = generator.normal(0, scale, (len(blocks), 1)).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8)
        raw = blocks.reshape(rows, -1)
    return StoredTensor(raw, (rows, columns), lambda part: dequantize(part, kind), order, (int(kind), numbers, size))


def activations(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Mostly small numbers, with a few columns that are far larger."""
    x = torch.randn((tokens, columns), generator=torch.Generator().manual_seed(seed))
    x[:, :: max(1, columns // 3)] *= 30
    return x


def bound(x: torch.Tensor, weights: torch.Tensor, kind: GGMLType) -> torch.Tensor:
    """[tokens, rows] what rounding may change: half a step of each activation, and float32 sums."""
    magnitude = weights.abs().double()
    sums = 1e-5 * (x.abs().double() @ magnitude.T) + 1e-30
    if kind in FLOATS:
        return sums
    blocks = x.double().view(len(x), -1, 32)
    # Sixteen bits: the block's largest number is 127 * 256 steps.
    step = blocks.abs().amax(-1, keepdim=True) / (127 * 256)
    halves = (step / 2).expand_as(blocks).reshape(len(x), -1)
    # Minima and zero points multiply the sum of a block: codes reach further than the numbers.
    return halves @ magnitude.T * 1.01 + 4 * sums


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (37, 3), (64, 2)])
def test_each_type_on_each_instruction_set_agrees_with_torch(library, kind, rows, blocks):
    columns = blocks * (256 if BLOCK_SIZES[kind][0] == 256 else 32)
    weights = stored(kind, rows, columns)
    numbers = weights.numbers()
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    assert torch.equal(layer.numbers(), numbers)
    bias = torch.randn(rows)
    for isa in library.isas:
        library.use_isa(isa)
        for tokens in (1, 2, 7, 13):
            x = activations(tokens, columns)
            error = (layer(x).double() - x.double() @ numbers.double().T).abs()
            assert (error <= bound(x, numbers, kind)).all(), isa
            assert torch.equal(layer(x, bias), layer(x) + bias)


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_plain_numbers_need_no_whole_blocks(library, kind):
    weights = stored(kind, 19, 45)
    x = activations(5, 45)
    for isa in library.isas:
        library.use_isa(isa)
        found = PackedLinear([PackedMatrix.of(library, weights)])(x)
        torch.testing.assert_close(found, x @ weights.numbers().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_row_is_bit_identical_alone_and_in_any_batch(library, kind):
    weights = stored(kind, 100, 512)
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    x = activations(141, 512)
    for isa in library.isas:
        library.use_isa(isa)
        whole = layer(x)
        for first, last in ((0, 1), (3, 12), (17, 141), (60, 67)):
            assert torch.equal(layer(x[first:last]), whole[first:last])
        library.set_threads(1)
        assert torch.equal(layer(x.flip(0)).flip(0), whole)
        library.set_threads(3)
        assert torch.equal(layer(x), whole)


def test_instruction_sets_agree_with_each_other(library):
    layer = PackedLinear([PackedMatrix.of(library, stored(GGMLType.Q4_1, 48, 256))])
    x = activations(9, 256)
    results = []
    for isa in library.isas:
        library.use_isa(isa)
        results.append(layer(x))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_not_finite_stays_so_and_touches_no_other_token(library, kind, number):
    weights = stored(kind, 32, 256)
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    x = activations(9, 256)
    for isa in library.isas:
        library.use_isa(isa)
        clean = layer(x)
        spoilt = x.clone()
        spoilt[4, 77] = number
        found = layer(spoilt)
        assert not found[4].isfinite().any()
        assert torch.equal(found[:4], clean[:4])
        assert torch.equal(found[5:], clean[5:])


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-37, 1e-20, 1e25])
def test_extreme_activations(library, size):
    weights = stored(GGMLType.Q4_1, 32, 256, scale=0.01)
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    x = torch.randn(6, 256) * size
    for isa in library.isas:
        library.use_isa(isa)
        expected = x.double() @ weights.numbers().double().T
        tolerance = 0.02 * float(expected.abs().max()) + 1e-33
        assert (layer(x).double() - expected).abs().max() <= tolerance


def test_scales_that_are_not_finite_reach_the_result(library):
    weights = stored(GGMLType.Q8_0, 16, 64)
    weights._raw[3, 0:2] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    for isa in library.isas:
        library.use_isa(isa)
        found = layer(activations(5, 64)).isfinite()
        assert not found[:, 3].any()
        assert found[:, [row for row in range(16) if row != 3]].all()


def test_parts_of_different_types_are_one_call(library):
    kinds = (GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.F16)
    parts = [stored(kind, rows, 256, seed=rows) for kind, rows in zip(kinds, (40, 17, 5), strict=True)]
    weight = PackedWeight(library, 62, 256)
    for start, part in zip((40, 57, 0), (parts[1], parts[2], parts[0]), strict=True):
        weight.place(start, part)
    x = activations(11, 256)
    expected = torch.cat([PackedLinear([PackedMatrix.of(library, part)])(x) for part in parts], dim=1)
    assert torch.equal(weight.packed()(x), expected)
    rows = torch.tensor([[0, 61], [40, 39]])
    numbers = torch.cat([part.numbers() for part in parts])
    assert torch.equal(weight.packed().look_up(rows), numbers[rows])


def test_rows_in_another_order_and_rows_and_columns_cut_off(library):
    order = np.random.default_rng(5).permutation(40)
    weights = stored(GGMLType.Q5_1, 40, 128, order=order)
    for part in (weights, weights[8:30], weights.narrow(1, 32, 64), weights.narrow(1, 16, 64)):
        packed = PackedMatrix.of(library, part)
        whole_blocks = part.shape[1] == 128 or part._columns.start % 32 == 0
        assert packed.kind == (GGMLType.Q5_1 if whole_blocks else GGMLType.F32)
        assert torch.equal(packed.look_up(torch.arange(part.shape[0])), part.numbers())


def test_input_shapes_and_strides(library):
    weights = stored(GGMLType.Q4_0, 20, 64)
    layer = PackedLinear([PackedMatrix.of(library, weights)])
    x = activations(12, 64)
    expected = layer(x)
    assert torch.equal(layer(x.view(3, 4, 64)), expected.view(3, 4, 20))
    assert torch.equal(layer(x[0]), expected[0])
    wide = torch.zeros(12, 100)
    wide[:, 10:74] = x
    assert torch.equal(layer(wide[:, 10:74]), expected)
    assert torch.equal(layer(x.T.contiguous().T), expected)
    assert torch.equal(layer(x.double()), expected)
    assert layer(x[:0]).shape == (0, 20)


def test_what_does_not_fit_is_refused(library):
    layer = PackedLinear([PackedMatrix.of(library, stored(GGMLType.Q4_0, 20, 64))])
    with pytest.raises(ValueError, match="the layer wants 64"):
        layer(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="bias"):
        layer(torch.zeros(2, 64), torch.zeros(19))
    for row in (-1, 20):
        with pytest.raises(IndexError, match="out of range"):
            layer.look_up(torch.tensor([0, row]))
    with pytest.raises(ValueError, match="cannot be packed"):
        PackedMatrix(library, GGMLType.Q4_K, 4, 128)
    weight = PackedWeight(library, 40, 64)
    with pytest.raises(ValueError, match="its shape is"):
        weight.place(30, stored(GGMLType.Q4_0, 20, 64))
    weight.place(0, stored(GGMLType.Q4_0, 20, 64))
    with pytest.raises(ValueError, match="rows from 20 on"):
        weight.packed()


def test_a_packed_weight_reads_as_a_float32_matrix(library):
    weights = stored(GGMLType.Q4_1, 20, 64)
    weight = PackedWeight(library, 20, 64)
    weight.data.copy_(weights)
    numbers = weights.numbers()
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.shape == (20, 64)
    assert weight.dtype == torch.float32
    assert weight.device.type == "cpu"
    assert torch.equal(weight + 0, numbers)
    assert torch.equal(weight[3], numbers[3])
    x = activations(3, 64)
    assert torch.equal(torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, numbers))
    assert weight.detach().numpy().shape == (20, 64)
    layer = torch.nn.Module()
    layer.register_parameter("weight", weight)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert torch.equal(layer.state_dict()["weight"], numbers)


def test_shards_of_tensor_parallel_ranks(library):
    weights = stored(GGMLType.Q4_1, 64, 128)
    numbers = weights.numbers()
    columns, rows = PackedWeight(library, 32, 128, 1, 2), PackedWeight(library, 64, 64, 1, 2)
    columns.load_column_parallel_weight(loaded_weight=weights)
    rows.load_row_parallel_weight(loaded_weight=weights)
    assert torch.equal(columns.packed().numbers(), numbers[32:])
    assert torch.equal(rows.packed().numbers(), numbers[:, 64:])
    fused = PackedWeight(library, 16 + 32, 128, 1, 2)
    fused.load_qkv_weight(
        loaded_weight=weights[32:], num_heads=2, shard_id="v", shard_offset=16, shard_size=32, tp_rank=1
    )
    fused.load_merged_column_weight(loaded_weight=weights[:32], shard_id=0, shard_offset=0, shard_size=16, tp_rank=1)
    assert torch.equal(fused.packed().numbers(), numbers[16:])
    with pytest.raises(ValueError, match="the model wants 64"):
        columns.load_column_parallel_weight(loaded_weight=weights[:10])


def test_a_boundary_inside_a_block_costs_memory_and_is_said(library, caplog):
    weights = stored(GGMLType.Q4_K, 8, 768)
    parts = [PackedWeight(library, 8, 256, rank, 3) for rank in range(3)]
    halves = [PackedWeight(library, 8, 384, rank, 2) for rank in range(2)]
    with caplog.at_level("WARNING", "hardpoint"):
        for part in parts:
            part.load_row_parallel_weight(weights)
        assert not caplog.records
        for half in halves:
            half.load_row_parallel_weight(weights)
    assert "rows of 768 numbers in blocks of 256 are not cut between blocks by 2 ranks" in caplog.text
    assert "with 1, 3 rank(s) they stay as stored" in caplog.text
    for pieces in (parts, halves):
        assert torch.equal(torch.cat([piece.packed().numbers() for piece in pieces], 1), weights.numbers())


def test_many_threads_many_times_give_the_same(library):
    layer = PackedLinear([PackedMatrix.of(library, stored(GGMLType.Q8_0, 400, 256))])
    x = activations(5, 256)
    expected = layer(x)
    for threads in (4, 1, 8, 2):
        library.set_threads(threads)
        assert library.threads == threads
        for _ in range(300):
            assert torch.equal(layer(x), expected)


def test_threads_do_not_keep_a_process_from_ending():
    code = "from hardpoint.worker.kernels.library import kernels; kernels().set_threads(4); print('ready')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "ready"
