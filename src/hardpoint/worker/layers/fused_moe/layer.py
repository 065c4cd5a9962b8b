"""The experts of a layer: chosen per token, computed, and added up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from hardpoint.contracts.custom_op import PluggableLayer
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.errors import ModelFileError
from hardpoint.worker.distributed.parallel_state import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from hardpoint.worker.layers.activation import get_act_and_mul_fn
from hardpoint.worker.layers.fused_moe.method import (
    DOWN,
    GATE,
    UP,
    UnquantizedFusedMoEMethod,
)
from hardpoint.worker.layers.fused_moe.routing import Routed, Router
from hardpoint.worker.layers.parameters import check_size, shard_of

# What checkpoints call an expert's parts.
_PARTS = {
    "gate_proj": GATE, "up_proj": UP, "down_proj": DOWN,
    "w1": GATE, "w3": UP, "w2": DOWN,
}  # fmt: skip
_OF_EXPERT = re.compile(r"(\d+)\.(\w+)\.weight")
_OF_ALL = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")


@PluggableLayer.register("fused_moe")
class FusedMoE(PluggableLayer):
    """A layer of experts.

    Each rank holds a part of every expert (the intermediate size is divided).

    top_k                  experts per token     intermediate_size  of one expert
    reduce_results         sum over the ranks; without it the caller does
    renormalize            make a token's weights add up to 1
    use_grouped_topk       choose groups of experts first (`num_expert_group`, `topk_group`)
    custom_routing_function (hidden_states, gating_output, topk, renormalize) -> weights, ids
    shared_experts         computed for every token and added
    gate                   computes the router's logits where `forward` is not given any
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: QuantizationConfig | None = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., Routed] | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        *,
        shared_experts: nn.Module | None = None,
        gate: nn.Module | None = None,
        router_logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < top_k <= num_experts:
            raise ModelFileError(f"the model wants {top_k} of {num_experts} experts per token", code="model-experts")
        _refuse(enable_eplb, num_redundant_experts, has_bias, is_sequence_parallel, (ep_size or 1) > 1)
        self.tp_size = get_tensor_model_parallel_world_size() if tp_size is None else tp_size
        self.tp_rank = get_tensor_model_parallel_rank() if self.tp_size > 1 else 0
        self.layer_name = self.prefix = prefix
        self.global_num_experts = self.local_num_experts = num_experts
        self.top_k = top_k
        self.hidden_size = hidden_size
        self.intermediate_size_per_partition = divide(intermediate_size, self.tp_size)
        self.reduce_results = reduce_results
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.activation = activation
        self.act_fn = get_act_and_mul_fn(activation)
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.router_logits_dtype = router_logits_dtype
        # Modules of the layer around this one, which registers them itself.
        self.__dict__["_shared_experts"], self.__dict__["_gate"] = shared_experts, gate
        self.router = Router(
            top_k, renormalize, use_grouped_topk, num_expert_group, topk_group, custom_routing_function,
            scoring_func, routed_scaling_factor, e_score_correction_bias,
        )  # fmt: skip
        self._loaded: set[tuple[str, int]] = set()
        self.quant_config = quant_config
        chosen = quant_config.get_quant_method(self, prefix) if quant_config is not None else None
        self.quant_method: Any = chosen or UnquantizedFusedMoEMethod(self)
        self.quant_method.create_weights(
            self,
            num_experts,
            hidden_size,
            self.intermediate_size_per_partition,
            self.params_dtype,
            weight_loader=self.weight_loader,
        )

    @property
    def shared_experts(self) -> nn.Module | None:
        """The experts that compute every token."""
        return self.__dict__["_shared_experts"]

    @property
    def is_internal_router(self) -> bool:
        """Whether it computes the router's logits itself."""
        return self.__dict__["_gate"] is not None

    # Loading.

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Copy this rank's part of one matrix of one expert; ValueError when it does not fit.

        shard_id  "w1" (gate), "w3" (up) or "w2" (down)
        """
        size, dim = self.intermediate_size_per_partition, 1 if shard_id == DOWN else 0
        check_size(loaded_weight, dim, size * self.tp_size)
        part = shard_of(loaded_weight, dim, size, self.tp_rank)
        self.quant_method.load_part(param, part, expert_id, size if shard_id == UP else 0)
        self._loaded.add((shard_id, expert_id))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load experts one by one (`3.up_proj.weight`) or all in one tensor (`up_proj`, `gate_up_proj`).

        Returns the names of the parameters of which nothing is missing any more.
        """
        for name, tensor in weights:
            single, whole = _OF_EXPERT.fullmatch(name), _OF_ALL.fullmatch(name)
            if single is not None and single[2] in _PARTS and int(single[1]) < self.global_num_experts:
                self._load(_PARTS[single[2]], int(single[1]), tensor)
            elif whole is not None and tensor.dim() == 3:
                self._load_all(whole[1], tensor)
            else:
                raise ValueError(f"{self.prefix} has {self.global_num_experts} experts, and no parameter {name!r}")
        experts = range(self.global_num_experts)
        complete = {part for part in (GATE, UP, DOWN) if all((part, expert) in self._loaded for expert in experts)}
        names = {name: DOWN if name.startswith("w2") else GATE for name, _ in self.named_parameters()}
        return {name for name, part in names.items() if part in complete and (part == DOWN or UP in complete)}

    def _load_all(self, name: str, tensor: torch.Tensor) -> None:
        check_size(tensor, 0, self.global_num_experts)
        for expert in range(self.global_num_experts):
            matrix = tensor[expert]
            if name == "gate_up_proj":
                gate, up = matrix.chunk(2, dim=0)
                self._load(GATE, expert, gate)
                self._load(UP, expert, up)
            else:
                self._load(_PARTS[name], expert, matrix)

    def _load(self, part: str, expert: int, tensor: torch.Tensor) -> None:
        param = self.quant_method.parameter_of(self, part, expert)
        param.weight_loader(param, tensor, "", shard_id=part, expert_id=expert)

    @staticmethod
    def make_expert_params_mapping(
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
    ) -> list[tuple[str, str, int, str]]:
        """For models that load by hand: (part of our name, part of the checkpoint's, expert, shard) of each matrix."""
        names = ((GATE, ckpt_gate_proj_name), (DOWN, ckpt_down_proj_name), (UP, ckpt_up_proj_name))
        return [
            (f"experts.{'w2_' if part == DOWN else 'w13_'}", f"experts.{expert}.{name}.", expert, part)
            for expert in range(num_experts)
            for part, name in names
        ]

    # Computing.

    def select_experts(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> Routed:
        """[tokens, hidden], [tokens, experts] -> weights and expert ids, [tokens, top_k] each."""
        return self.router.select_experts(hidden_states, router_logits)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens, hidden] and [tokens, experts] -> [tokens, hidden], the shared experts' part included."""
        if router_logits is None:
            assert self.is_internal_router, f"{self.prefix} has no gate of its own and was given no logits"
            router_logits, _ = self.__dict__["_gate"](hidden_states)
        weights, ids = self.select_experts(hidden_states, router_logits)
        output = self.quant_method.apply(self, hidden_states, weights, ids)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return self.maybe_all_reduce_tensor_model_parallel(output) if self.reduce_results else output

    def maybe_all_reduce_tensor_model_parallel(self, final_hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum what the ranks computed."""
        return tensor_model_parallel_all_reduce(final_hidden_states) if self.tp_size > 1 else final_hidden_states

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"experts={self.global_num_experts}, top_k={self.top_k}, tp_size={self.tp_size}"


# What plugins of later versions call: its result is summed over the ranks.
FusedMoEFactory = partial(FusedMoE, reduce_results=True)


def fused_moe_make_expert_params_mapping(
    model: nn.Module, *args: Any, **kwargs: Any
) -> list[tuple[str, str, int, str]]:
    """As `FusedMoE.make_expert_params_mapping`, for a given model."""
    return FusedMoE.make_expert_params_mapping(*args, **kwargs)


def _refuse(balanced: bool, redundant: int, has_bias: bool, sequence_parallel: bool, spread: bool) -> None:
    asked = {
        "enable_eplb": balanced,
        "num_redundant_experts": bool(redundant),
        "has_bias": has_bias,
        "is_sequence_parallel": sequence_parallel,
        "ep_size": spread,
    }
    found = [name for name, is_asked in asked.items() if is_asked]
    if found:
        raise ValueError(f"experts with {', '.join(found)} are not supported")
