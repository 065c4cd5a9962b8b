"""Mixtral: Mistral with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoEFactory, GateLinear
from hardpoint.worker.models.decoder import DecoderAttention, DecoderLayer, DecoderModel
from hardpoint.worker.models.experts import ExpertsForCausalLM, config_of_gate

MixtralAttention = DecoderAttention


class MixtralMoE(nn.Module):
    """The gate and the experts of a layer."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.gate = GateLinear(
            hidden_size,
            num_experts,
            bias=False,
            params_dtype=params_dtype,
            prefix=f"{prefix}.gate",
            quant_config=config_of_gate(quant_config),
        )
        self.experts = FusedMoEFactory(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            params_dtype=params_dtype,
            renormalize=True,
            quant_config=quant_config,
            gate=self.gate,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, router_logits)


class MixtralDecoderLayer(DecoderLayer):
    """One layer."""

    mlp_name = "block_sparse_moe"

    def _make_mlp(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        return MixtralMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            quant_config=quant_config,
            prefix=prefix,
        )


class MixtralModel(DecoderModel):
    """The stack of layers."""

    layer_type = MixtralDecoderLayer


class MixtralForCausalLM(ExpertsForCausalLM):
    """Mixtral with its output head."""

    stack_type = MixtralModel
