"""Mixtral: Mistral with experts in place of the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoEFactory, GateLinear
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import (
    DecoderAttention,
    DecoderForCausalLM,
    DecoderModel,
    kv_heads_of,
)
from hardpoint.worker.models.experts import config_of_gate, count_experts

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


class MixtralDecoderLayer(nn.Module):
    """One layer."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.block_sparse_moe = MixtralMoE(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.block_sparse_moe",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens], [tokens, hidden] twice -> this layer's contribution and the residual stream before it."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual


@support_torch_compile
class MixtralModel(DecoderModel):
    """The stack of layers."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        decoder_layer_type: type[nn.Module] = MixtralDecoderLayer,
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        super().__init__(
            vllm_config=vllm_config,
            prefix=prefix,
            make_layer=lambda prefix: decoder_layer_type(
                config=config,
                cache_config=vllm_config.cache_config,
                quant_config=vllm_config.quant_config,
                prefix=prefix,
            ),
        )


class MixtralForCausalLM(DecoderForCausalLM):
    """Mixtral with its output head."""

    model_type = MixtralModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        count_experts(self)
