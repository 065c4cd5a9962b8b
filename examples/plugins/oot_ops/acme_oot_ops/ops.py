"""The operation. It derives from what it replaces and is built wherever a model asks for that."""

from typing import Any

import torch

from hardpoint.worker.layers.layernorm import RMSNorm


@RMSNorm.register_oot
class AcmeRMSNorm(RMSNorm):
    """Computes in float64, and counts its calls."""

    calls = 0

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """[..., hidden] -> normed; with a residual -> (normed, x + residual)."""
        AcmeRMSNorm.calls += 1
        if residual is not None:
            x = residual = x + residual
        wide = x.double()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * scale).to(x.dtype) * self.weight
        return normed if residual is None else (normed, residual)

    # What is not overridden falls back: forward_cpu and forward_oot to forward_native, forward_hip to forward_cuda.
