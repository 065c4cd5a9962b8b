"""Routing that ignores what the model wants, for measuring how experts behave under a given load.

`VLLM_MOE_ROUTING_SIMULATION_STRATEGY` names the strategy; a plugin registers others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from hardpoint.errors import ConfigError
from hardpoint.log import init_logger

logger = init_logger(__name__)


class RoutingStrategy(ABC):
    """Chooses experts; one instance serves all layers."""

    @abstractmethod
    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, hidden], [tokens, experts] -> weights and expert ids, [tokens, top_k] each."""


class DistributionBasedRouting(RoutingStrategy):
    """Expert numbers drawn at random, all of a token with the same weight.

    distribution   "uniform", or "normal" with `mean` and `std` as shares of the number of experts
    """

    def __init__(self, distribution: str = "uniform", **distribution_params: Any) -> None:
        if distribution not in ("uniform", "normal"):
            raise ValueError(f"unknown distribution {distribution!r}; known: uniform, normal")
        self.distribution = distribution
        self.mean = float(distribution_params.pop("mean", 0.5))
        self.std = float(distribution_params.pop("std", 0.2))
        if distribution_params:
            raise ValueError(f"unknown settings: {', '.join(sorted(distribution_params))}")

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token's experts differ from each other."""
        tokens, experts = router_logits.shape
        places = torch.arange(experts, dtype=torch.float32, device=router_logits.device)
        if self.distribution == "uniform":
            likely = torch.ones(experts, device=router_logits.device)
        else:
            distance = (places / experts - self.mean) / self.std
            likely = torch.exp(-0.5 * distance**2) + 1e-9
        ids = torch.multinomial(likely.expand(tokens, experts), top_k)
        weights = torch.full((tokens, top_k), 1.0 / top_k, dtype=torch.float32, device=router_logits.device)
        return weights, ids.to(indices_type or torch.long)


class RoutingSimulator:
    """The strategies by name."""

    _routing_strategies: ClassVar[dict[str, RoutingStrategy]] = {
        "uniform_random": DistributionBasedRouting("uniform"),
        "normal_routing": DistributionBasedRouting("normal"),
    }

    @classmethod
    def register_strategy(cls, name: str, strategy: RoutingStrategy) -> None:
        """Add a strategy; one of the same name is replaced. TypeError for an object of another kind."""
        if not callable(getattr(strategy, "route_tokens", None)):
            raise TypeError(f"routing strategy {name!r} is a {type(strategy).__name__}, which has no route_tokens")
        cls._routing_strategies[name] = strategy

    @classmethod
    def get_available_strategies(cls) -> list[str]:
        """The names that can be chosen."""
        return list(cls._routing_strategies)

    @classmethod
    def simulate_routing(
        cls,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        strategy_name: str,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route by a strategy; ConfigError (a ValueError) for an unknown name."""
        strategy = cls._routing_strategies.get(strategy_name)
        if strategy is None:
            raise ConfigError(
                f"VLLM_MOE_ROUTING_SIMULATION_STRATEGY is {strategy_name!r}, which is no routing strategy",
                code="env-value",
                origin="the process environment",
                fix=f"known are {', '.join(cls._routing_strategies)}; a plugin can register others",
            )
        logger.warning_once("experts are chosen by the strategy %r: what the model says means nothing", strategy_name)
        return strategy.route_tokens(hidden_states, router_logits, top_k, indices_type)
