"""Mixtures of experts: the router's gate, how experts are chosen, and the layer that computes them."""

from hardpoint.worker.layers.fused_moe.gate import GateLinear
from hardpoint.worker.layers.fused_moe.layer import (
    FusedMoE,
    FusedMoEFactory,
    fused_moe_make_expert_params_mapping,
)
from hardpoint.worker.layers.fused_moe.method import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from hardpoint.worker.layers.fused_moe.routing import fused_topk, grouped_topk
from hardpoint.worker.layers.fused_moe.simulation import (
    DistributionBasedRouting,
    RoutingSimulator,
    RoutingStrategy,
)

SharedFusedMoE = FusedMoE

__all__ = [
    "DistributionBasedRouting",
    "FusedMoE",
    "FusedMoEFactory",
    "FusedMoEMethodBase",
    "GateLinear",
    "RoutingSimulator",
    "RoutingStrategy",
    "SharedFusedMoE",
    "UnquantizedFusedMoEMethod",
    "fused_moe_make_expert_params_mapping",
    "fused_topk",
    "grouped_topk",
]
