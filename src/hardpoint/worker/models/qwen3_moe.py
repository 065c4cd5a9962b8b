"""Qwen 3 with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.current import get_current_vllm_config
from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoEFactory, GateLinear
from hardpoint.worker.models.decoder import DecoderAttention, DecoderModel, GatedMLP
from hardpoint.worker.models.experts import FUSED_PARTS_AND_EXPERTS, ExpertsForCausalLM, config_of_gate
from hardpoint.worker.models.loading import extract_layer_index
from hardpoint.worker.models.qwen3 import Qwen3DecoderLayer

Qwen3MoeMLP = GatedMLP
Qwen3MoeAttention = DecoderAttention


class Qwen3MoeSparseMoeBlock(nn.Module):
    """The gate and the experts of a layer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.n_routed_experts = self.n_logical_experts = config.num_experts
        self.n_physical_experts = self.n_local_physical_experts = config.num_experts
        self.n_redundant_experts = 0
        self.gate = GateLinear(
            config.hidden_size,
            config.num_experts,
            bias=False,
            prefix=f"{prefix}.gate",
            quant_config=config_of_gate(vllm_config.quant_config),
        )
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            renormalize=config.norm_topk_prob,
            activation=config.hidden_act,
            quant_config=vllm_config.quant_config,
            gate=self.gate,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """One layer, with experts or with a plain MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(config, vllm_config.cache_config, vllm_config.quant_config, prefix)

    def _make_mlp(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        layer = extract_layer_index(prefix)
        sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        if sparse and layer not in (config.mlp_only_layers or ()):
            return Qwen3MoeSparseMoeBlock(get_current_vllm_config(), prefix=prefix)
        return super()._make_mlp(config, quant_config, prefix)


class Qwen3MoeModel(DecoderModel):
    """The stack of layers."""

    layer_type = Qwen3MoeDecoderLayer
    hf_to_vllm_mapper = FUSED_PARTS_AND_EXPERTS

    def _make_layer(self, layer_type: type[nn.Module], vllm_config: VllmConfig, prefix: str) -> nn.Module:
        return layer_type(vllm_config=vllm_config, prefix=prefix)


class Qwen3MoeForCausalLM(ExpertsForCausalLM):
    """Qwen 3 with experts and its output head."""

    stack_type = Qwen3MoeModel
