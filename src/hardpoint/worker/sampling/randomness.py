"""Random numbers for sampling: one uniform per drawn token.

A seeded request's number for its output position i is a function of (seed, i) alone, so that it is the
same alone, in any batch and after a preemption. Requests without a seed share the worker's generator.
"""

from __future__ import annotations

import numpy as np

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


def seeded_uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draw number `positions[i]` of stream `keys[i]`.

    keys       [rows] uint64, from `seed_key`
    positions  [rows] int64, output positions from 0
    ->         [rows] float64 in [0, 1)
    """
    # SplitMix64 used as what it is: a mixed counter.
    with np.errstate(over="ignore"):
        state = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(_MIX_2)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_int(word: int) -> int:
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)
