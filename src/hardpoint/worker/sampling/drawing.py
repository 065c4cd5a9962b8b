"""Choosing tokens in the CPU kernels: all rows of a step in one call. `draw` is the reference in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.worker.kernels.library import Library
from hardpoint.worker.sampling.metadata import SamplingMetadata
from hardpoint.worker.sampling.randomness import seeded_streams

# What the kernels are told of a row: `HpDraw` in csrc/floats.h.
_ROW = np.dtype(
    [
        ("number", np.float64),
        ("stream", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("greedy", np.int32),
        ("seeded", np.int32),
        ("reserved", np.int32),
    ]
)
# What is drawn of a row with NaN, and of one in which nothing is allowed.
NAN, NOTHING = -1, -2


class RowDraws:
    """How the rows of a step draw, built once per set of rows."""

    def __init__(self, metadata: SamplingMetadata, library: Library) -> None:
        self._library = library
        self._draws = metadata.draws
        count = metadata.num_rows
        self._rows = np.zeros(count, _ROW)
        self._rows["greedy"] = 1
        self._rows["greedy"][metadata.random_rows.numpy()] = 0
        for draw in metadata.draws:
            self._rows["seeded"][draw.rows.numpy()] = bool(draw.seeded)
        for name, off in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("top_k", 1 << 62)):
            values = getattr(metadata, name)
            self._rows[name] = off if values is None else values.numpy()
        self._tokens = np.zeros(count, np.int64)

    def choose(self, logits: Tensor, uniforms: Callable[[int], np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """[rows, vocab] float32 -> [rows] int64 tokens, NAN or NOTHING.

        uniforms  gives so many numbers in [0, 1)
        """
        rows = self._rows
        for draw in self._draws:
            places = draw.rows.numpy()
            if draw.seeded:
                positions = np.array([len(request.output_token_ids) for request in draw.seeded])
                rows["stream"][places] = seeded_streams(draw.keys, positions).numpy()
            else:
                rows["number"][places] = uniforms(len(places))
        count, vocab = logits.shape
        self._library.draw(
            rows.ctypes.data, logits.data_ptr(), logits.stride(0), vocab, count, self._tokens.ctypes.data
        )
        return self._tokens.copy()


def draws_of(metadata: SamplingMetadata, logits: Tensor, library: Library | None) -> RowDraws | None:
    """The rows' draws for the kernels; None where torch is to draw."""
    if library is None or logits.device.type != "cpu" or logits.dtype is not torch.float32 or logits.stride(-1) != 1:
        return None
    if metadata.drawing is None:
        metadata.drawing = RowDraws(metadata, library)
    return metadata.drawing
