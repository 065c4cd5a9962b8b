"""Decoders of GGUF storage types, held against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType
from hardpoint.worker.quantization.ggml import DECODERS, dequantize

ROWS, COLUMNS = 6, 512


def random_rows(kind: GGMLType) -> np.ndarray:
    """Rows of arbitrary bytes, with the float16 and bfloat16 fields kept finite."""
    numbers, size = BLOCK_SIZES[kind]
    generator = np.random.default_rng(int(kind))
    blocks = generator.integers(0, 256, (ROWS * COLUMNS // numbers, size), dtype=np.uint8)
    halves = {
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "F32": (),
        "F16": (0,),
        "BF16": (),
    }.get(kind.name, (0, 2) if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,))
    for at in halves:
        blocks[:, at : at + 2] = generator.normal(0, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind.name in ("F32", "BF16"):
        # The exponent lies in the last two bytes.
        blocks[:, -1] = generator.integers(0x3E, 0x40, len(blocks))
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", DECODERS, ids=lambda kind: kind.name)
def test_decoders_agree_with_the_gguf_package(kind):
    rows = random_rows(kind)
    expected = gguf.dequantize(rows, GGMLQuantizationType(int(kind))).reshape(ROWS, COLUMNS)
    found = dequantize(torch.from_numpy(rows), kind)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)
    assert np.abs(expected).max() > 0


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_what_is_quantised_comes_back_close(kind):
    values = np.random.default_rng(0).normal(0, 1, (ROWS, COLUMNS)).astype(np.float32)
    rows = gguf.quantize(values, GGMLQuantizationType[kind])
    found = dequantize(torch.from_numpy(np.array(rows)).view(torch.uint8).reshape(ROWS, -1), GGMLType[kind])
    assert np.abs(found.numpy() - values).max() < (0.5 if kind.startswith("Q4") else 0.3)


def test_types_without_a_decoder_are_not_decoded():
    assert set(DECODERS) == {GGMLType[name] for name in (
        ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
    )}  # fmt: skip
    with pytest.raises(KeyError):
        dequantize(torch.zeros(1, 18, dtype=torch.uint8), GGMLType.IQ4_NL)
