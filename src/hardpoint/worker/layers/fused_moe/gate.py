"""The router's gate: which expert a token wants, in numbers."""

from __future__ import annotations

import torch

from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.linear import ReplicatedLinear


class GateLinear(ReplicatedLinear):
    """A small linear layer, the same on every rank, whose numbers stay what they are.

    out_dtype             number format of what it returns; that of the input unless given
    force_fp32_compute    multiply in float32 whatever the input is
    quant_config          how it is stored and computed, if that does not round; by most it is left out
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        out_dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        force_fp32_compute: bool = False,
        prefix: str = "",
        *,
        quant_config: QuantizationConfig | None = None,
    ) -> None:
        if force_fp32_compute:
            params_dtype, out_dtype = torch.float32, out_dtype or torch.float32
        super().__init__(
            input_size, output_size, bias=bias, params_dtype=params_dtype, quant_config=quant_config, prefix=prefix
        )
        self.out_dtype = out_dtype

    def set_out_dtype(self, out_dtype: torch.dtype) -> None:
        """Choose the number format later; ValueError when another was chosen before."""
        if self.out_dtype not in (None, out_dtype):
            raise ValueError(f"the gate returns {self.out_dtype} already, not {out_dtype}")
        self.out_dtype = out_dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens, hidden] -> [tokens, experts], and the bias where it is handed out."""
        output = super().forward(x.to(self.params_dtype))
        logits, bias = output if isinstance(output, tuple) else (output, None)
        return logits.to(self.out_dtype or x.dtype), bias
