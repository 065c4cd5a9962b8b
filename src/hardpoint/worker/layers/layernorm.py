"""Normalisation layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.custom_op import CustomOp
from hardpoint.worker.kernels import ops

NormOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@CustomOp.register("rms_norm", dynamic_arg_dims={"x": 0, "residual": 0})
class RMSNorm(CustomOp):
    """x / rms(x) * weight, computed in float32; with a residual, of x + residual.

    var_hidden_size  take the mean square of the first elements only
    has_weight       without it the weight is 1
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        var_hidden_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.variance_size_override = None if var_hidden_size == hidden_size else var_hidden_size
        self.has_weight = has_weight
        weight = torch.ones(hidden_size, dtype=dtype or torch.get_default_dtype())
        if has_weight:
            self.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.register_buffer("weight", weight, persistent=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """[..., hidden] -> normed; with a residual -> (normed, x + residual)."""
        if residual is not None:
            x = residual = x + residual
        normed = self._norm(x)
        return normed if residual is None else (normed, residual)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32 and self.variance_size_override is None:
            return F.rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
        wide = x.float()
        measured = wide if self.variance_size_override is None else wide[..., : self.variance_size_override]
        scale = torch.rsqrt(measured.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        return (wide * scale).to(x.dtype) * self.weight

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """The same in the CPU kernels, where they apply."""
        library = ops.library_for(self, _RMS_NORM, x) if self.variance_size_override is None else None
        done = (
            ops.rms_norm(library, x, residual, self.weight, 0.0, self.variance_epsilon) if library is not None else None
        )
        return self.forward_native(x, residual) if done is None else done

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """As `forward_native`."""
        return self.forward_native(x, residual)

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"hidden_size={self.hidden_size}, eps={self.variance_epsilon}"


@CustomOp.register("gemma_rms_norm")
class GemmaRMSNorm(CustomOp):
    """x / rms(x) * (1 + weight), wholly in float32, as Gemma has it."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.zeros(hidden_size), requires_grad=False)

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """[..., hidden] -> normed; with a residual -> (normed, x + residual)."""
        if residual is not None:
            x = residual = x + residual
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * scale * (1.0 + self.weight.float())).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def forward_cpu(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """The same in the CPU kernels, where they apply."""
        library = ops.library_for(self, _GEMMA_RMS_NORM, x)
        done = (
            ops.rms_norm(library, x, residual, self.weight, 1.0, self.variance_epsilon) if library is not None else None
        )
        return self.forward_native(x, residual) if done is None else done

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """As `forward_native`."""
        return self.forward_native(x, residual)


@CustomOp.register("layer_norm")
class LayerNorm(CustomOp):
    """Mean 0, variance 1, then weight and bias; computed in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(dim), requires_grad=False)

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """[..., dim] -> [..., dim]."""
        normed = F.layer_norm(x.float(), (self.dim,), self.weight.float(), self.bias.float(), self.eps)
        return normed.to(x.dtype)

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the CPU kernels, where they apply."""
        library = ops.library_for(self, _LAYER_NORM, x)
        done = ops.layer_norm(library, x, self.weight, self.bias, self.eps) if library is not None else None
        return self.forward_native(x) if done is None else done

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward_native`."""
        return self.forward_native(x)


# As they were written: where a plugin has put others, those compute.
_RMS_NORM, _GEMMA_RMS_NORM = RMSNorm.forward_native, GemmaRMSNorm.forward_native
_LAYER_NORM = LayerNorm.forward_native
