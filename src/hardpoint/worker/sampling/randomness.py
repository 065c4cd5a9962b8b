"""Random numbers of seeded requests: one per output position and token of the vocabulary.

Each is a function of (seed, position, token) alone, so that a request draws the same alone, in any batch
and after a preemption. Requests without a seed share the worker's generator.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def seed_key(seed: int) -> int:
    """Spread a seed of any size over 64 bits, so that near seeds have unrelated streams."""
    key = _MIX_1 if seed < 0 else 0
    while True:
        key = _mix_int((key ^ (seed & _WORD)) + _GOLDEN & _WORD)
        seed >>= 64
        if seed in (0, -1):
            return key


def seeded_streams(keys: np.ndarray, positions: np.ndarray) -> Tensor:
    """Where the numbers of each request's next token begin, for `exponentials`.

    keys       [rows] uint64, from `seed_key`
    positions  [rows] int64, output positions from 0
    ->         [rows] int64
    """
    return _mixed(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))


def exponentials(streams: Tensor, tokens: Tensor) -> Tensor:
    """The exponentially distributed number of each token in its row's stream.

    streams  [rows] int64, from `seeded_streams`
    tokens   [rows or 1, columns] int64
    ->       [rows, columns] float64, greater than 0
    """
    words = _mixed(streams.unsqueeze(-1), tokens)
    return ((words >> 11 & _low_bits(53)).double() + 0.5).mul_(2.0**-53).log_().neg_()


def _mixed(state: Tensor, counter: Tensor) -> Tensor:
    """SplitMix64 used as what it is, a mixed counter; int64 wraps around as uint64 does."""
    state = state + (counter + 1) * _signed(_GOLDEN)
    state = (state ^ (state >> 30 & _low_bits(34))) * _signed(_MIX_1)
    state = (state ^ (state >> 27 & _low_bits(37))) * _signed(_MIX_2)
    return state ^ (state >> 31 & _low_bits(33))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _low_bits(count: int) -> int:
    """What makes an arithmetic shift a logical one."""
    return (1 << count) - 1


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)
