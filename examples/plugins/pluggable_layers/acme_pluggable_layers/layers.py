"""The layer. Unlike an operation it cannot be switched off, and it keeps parameters of its own."""

from typing import Any

import torch

from hardpoint.worker.layers.linear import RowParallelLinear


@RowParallelLinear.register_oot
class AcmeRowParallelLinear(RowParallelLinear):
    """Remembers the largest number it has computed."""

    largest = 0.0

    def forward(self, input_: torch.Tensor) -> Any:
        """[..., input] -> ([..., output], bias or None)."""
        result = super().forward(input_)
        output = result[0] if isinstance(result, tuple) else result
        AcmeRowParallelLinear.largest = max(AcmeRowParallelLinear.largest, float(output.abs().max()))
        return result
