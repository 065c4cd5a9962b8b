"""Qwen 3 with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoEFactory, GateLinear
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderLayer,
    DecoderModel,
    GatedMLP,
    kv_heads_of,
)
from hardpoint.worker.models.experts import FUSED_PARTS_AND_EXPERTS, config_of_gate, count_experts
from hardpoint.worker.models.loading import extract_layer_index

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


class Qwen3MoeDecoderLayer(DecoderLayer):
    """One layer, with experts or with a plain MLP."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_text_config, vllm_config.quant_config
        bias = bool(getattr(config, "attention_bias", False))
        self.hidden_size = config.hidden_size
        self.self_attn = DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
            bias=bias,
            bias_o_proj=bias,
            norm=RMSNorm,
        )
        self.mlp = self._make_mlp(config, vllm_config, quant_config, prefix)
        self._make_norms(config)

    def _make_mlp(
        self, config: Any, vllm_config: VllmConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        layer = extract_layer_index(prefix)
        sparse = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        if sparse and layer not in (config.mlp_only_layers or ()):
            return Qwen3MoeSparseMoeBlock(vllm_config, prefix=f"{prefix}.mlp")
        return GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, prefix=f"{prefix}.mlp"
        )


@support_torch_compile
class Qwen3MoeModel(DecoderModel):
    """The stack of layers."""

    hf_to_vllm_mapper = FUSED_PARTS_AND_EXPERTS

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = Qwen3MoeDecoderLayer,
    ) -> None:
        super().__init__(
            vllm_config=vllm_config,
            prefix=prefix,
            make_layer=lambda prefix: decoder_layer_type(vllm_config=vllm_config, prefix=prefix),
        )


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen 3 with experts and its output head."""

    model_type = Qwen3MoeModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        count_experts(self)
