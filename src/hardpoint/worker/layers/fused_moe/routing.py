"""How a token's experts are chosen from the router's logits: [tokens, experts] -> weights and ids [tokens, top_k]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.env import envs
from hardpoint.errors import ModelFileError
from hardpoint.worker.layers.fused_moe.simulation import RoutingSimulator

Routed = tuple[torch.Tensor, torch.Tensor]

_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}


def scores_of(gating_output: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """float32 scores of all experts; ModelFileError for a function that is not known."""
    function = _SCORES.get(scoring_func)
    if function is None:
        raise ModelFileError(
            f"the model scores its experts with {scoring_func!r}, which is not supported",
            code="model-experts",
            fix=f"known are {', '.join(_SCORES)}",
        )
    return function(gating_output.float())


def _renormalized(weights: torch.Tensor) -> torch.Tensor:
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)


def fused_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
) -> Routed:
    """The `topk` experts with the highest scores.

    renormalize              make a token's weights add up to 1
    e_score_correction_bias  [experts] added to the scores for the choice only
    """
    scores = scores_of(gating_output, scoring_func)
    if e_score_correction_bias is None:
        weights, ids = torch.topk(scores, topk, dim=-1)
    else:
        ids = torch.topk(scores + e_score_correction_bias, topk, dim=-1).indices
        weights = scores.gather(-1, ids)
    return (_renormalized(weights) if renormalize else weights), ids


def grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> Routed:
    """The `topk` experts among those of the `topk_group` best groups.

    A group is as good as its best expert; with a correction bias, as its two best together.
    """
    scores = scores_of(gating_output, scoring_func)
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    groups = choice.view(choice.shape[0], num_expert_group, -1)
    counted = 1 if e_score_correction_bias is None else 2
    best = groups.topk(counted, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(1, torch.topk(best, topk_group, dim=-1).indices, True)
    masked = groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    ids = torch.topk(masked, topk, dim=-1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = _renormalized(weights)
    return weights * routed_scaling_factor, ids


@dataclass
class Router:
    """A layer's way of choosing, with its settings; see `FusedMoE`."""

    top_k: int
    renormalize: bool
    use_grouped_topk: bool
    num_expert_group: int | None
    topk_group: int | None
    custom_routing_function: Callable[..., Routed] | None
    scoring_func: str
    routed_scaling_factor: float
    e_score_correction_bias: torch.Tensor | None

    def select_experts(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Routed:
        """[tokens, hidden], [tokens, experts] -> float32 weights and int64 ids, [tokens, top_k] each."""
        weights, ids = self._choose(hidden_states, router_logits)
        return weights.float(), ids.long()

    def _choose(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Routed:
        simulated = envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY
        if simulated:
            return RoutingSimulator.simulate_routing(hidden_states, router_logits, simulated, self.top_k)
        if self.custom_routing_function is not None:
            return self.custom_routing_function(
                hidden_states=hidden_states,
                gating_output=router_logits,
                topk=self.top_k,
                renormalize=self.renormalize,
            )
        common: dict[str, Any] = {
            "scoring_func": self.scoring_func,
            "e_score_correction_bias": self.e_score_correction_bias,
        }
        if self.use_grouped_topk:
            return grouped_topk(
                hidden_states, router_logits, self.top_k, self.renormalize,
                self.num_expert_group or 1, self.topk_group or 1,
                routed_scaling_factor=self.routed_scaling_factor, **common,
            )  # fmt: skip
        weights, ids = fused_topk(hidden_states, router_logits, self.top_k, self.renormalize, **common)
        return weights * self.routed_scaling_factor, ids
