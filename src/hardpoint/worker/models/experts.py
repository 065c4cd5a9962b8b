"""What a model with experts says of them."""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.layers.fused_moe import FusedMoE
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


def count_experts(model: Any) -> None:
    """Give a model the counters of the `MixtureOfExperts` protocol, from the layers that are on this stage."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    experts = layers[0].global_num_experts if layers else 0
    model.moe_layers = layers
    model.expert_weights = []
    model.num_moe_layers = len(layers)
    model.num_expert_groups = 1
    model.num_shared_experts = int(bool(layers) and layers[0].shared_experts is not None)
    model.num_logical_experts = model.num_physical_experts = experts
    model.num_local_physical_experts = model.num_routed_experts = experts
    model.num_redundant_experts = 0
