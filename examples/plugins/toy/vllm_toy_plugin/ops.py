"""The toy op: every RMSNorm of a model becomes this one."""

import torch
from vllm.model_executor.layers.layernorm import RMSNorm


@RMSNorm.register_oot
class ToyRMSNorm(RMSNorm):
    """Marks itself and computes what the built-in computes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.toy = True

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Where a GPU kernel would go."""
        return super().forward_cuda(x, residual)
