"""What models with experts share."""

from __future__ import annotations

from typing import Any

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoE
from hardpoint.worker.models.causal_lm import DecoderForCausalLM
from hardpoint.worker.models.decoder import FUSED_PARTS
from hardpoint.worker.models.loading import WeightsMapper

# As `FUSED_PARTS`, for models whose experts have parts of the same names.
FUSED_PARTS_AND_EXPERTS = FUSED_PARTS | WeightsMapper(
    orig_to_new_regex={
        rf"\.experts\.(\d+)\.{theirs}\.": rf".experts.\1.{ours}."
        for theirs, ours in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    }
)


def config_of_gate(quant_config: QuantizationConfig | None) -> QuantizationConfig | None:
    """What a gate is stored and computed by: with GGUF files by the kernels, which do not round float weights."""
    return quant_config if quant_config is not None and quant_config.get_name() == "gguf" else None


class ExpertsForCausalLM(DecoderForCausalLM):
    """A decoder with experts, and with the counters of the `MixtureOfExperts` protocol for this stage's layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        layers = [module for module in self.modules() if isinstance(module, FusedMoE)]
        experts = layers[0].global_num_experts if layers else 0
        self.moe_layers = layers
        self.expert_weights: list[Any] = []
        self.num_moe_layers = len(layers)
        self.num_expert_groups = 1
        self.num_shared_experts = int(bool(layers) and layers[0].shared_experts is not None)
        self.num_logical_experts = self.num_physical_experts = experts
        self.num_local_physical_experts = self.num_routed_experts = experts
        self.num_redundant_experts = 0
