"""How the CPU backend stores keys and values, and how torch reads and writes them. The kernels do the same in C++.

A block holds, for each key/value head, a section of keys [head_size, block_size] and a section of values
[block_size, head_size]: keys lie so that the scores of neighbouring tokens are computed together. Stored as int8,
each section ends with a float32 factor for each token, the largest number of its head divided by 127.
"""

from __future__ import annotations

import torch

# `--kv-cache-dtype` -> the tensor's type. `auto` is the model's own.
CACHE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8_per_token_head": torch.int8,
}
# Bytes that int8 keeps besides each head of a token.
FACTOR_BYTES = 4


def cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype: str
) -> tuple[int, ...]:
    """(2, blocks, key/value heads, block size, numbers); what stands where inside a section is said above."""
    numbers = head_size + FACTOR_BYTES if cache_dtype == "int8_per_token_head" else head_size
    return 2, num_blocks, num_kv_heads, block_size, numbers


class PagedCache:
    """A layer's cache tensor, read and written in torch."""

    def __init__(self, cache: torch.Tensor, head_size: int) -> None:
        self.block_size = cache.shape[3]
        self.head_size = head_size
        numbers = self.block_size * head_size
        keys, values = cache[0].flatten(2), cache[1].flatten(2)
        self._keys = keys[..., :numbers].unflatten(2, (head_size, self.block_size))
        self._values = values[..., :numbers].unflatten(2, (self.block_size, head_size))
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        if cache.dtype is torch.int8:
            self._factors = keys[..., numbers:].view(torch.float32), values[..., numbers:].view(torch.float32)

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [tokens, kv_heads, head_size] keys and values at [tokens] slots."""
        blocks, places = slots // self.block_size, slots % self.block_size
        if self._factors is not None:
            (key, key_factors), (value, value_factors) = _rounded(key), _rounded(value)
            self._factors[0][blocks, :, places] = key_factors
            self._factors[1][blocks, :, places] = value_factors
        self._keys[blocks, :, :, places] = key.to(self._keys.dtype)
        self._values[blocks, :, places] = value.to(self._values.dtype)

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[kv_heads, tokens of the blocks, head_size] keys and values."""
        keys = self._keys.index_select(0, blocks).to(dtype).permute(1, 0, 3, 2).flatten(1, 2)
        values = self._values.index_select(0, blocks).to(dtype).permute(1, 0, 2, 3).flatten(1, 2)
        if self._factors is None:
            return keys, values
        key_factors, value_factors = (
            part.index_select(0, blocks).transpose(0, 1).flatten(1).unsqueeze(-1).to(dtype) for part in self._factors
        )
        return keys * key_factors, values * value_factors


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_size] -> whole numbers from -127 to 127, and the factors [...] they are multiplied with."""
    x = x.float()
    factors = x.abs().amax(-1) / 127.0
    factors = torch.where(factors.isfinite(), factors, torch.nan)
    factors = torch.where(factors <= 1e-37, 0.0, factors)
    codes = (x / factors.unsqueeze(-1)).round()
    return torch.where((factors > 0).unsqueeze(-1), codes, 0.0), factors
