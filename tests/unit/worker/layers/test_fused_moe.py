"""Experts: how they are chosen, loaded and computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import VllmConfig
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.worker.layers.fused_moe import (
    FusedMoE,
    FusedMoEFactory,
    GateLinear,
    RoutingSimulator,
    RoutingStrategy,
    fused_topk,
    grouped_topk,
)
from hardpoint.worker.layers.linear import ReplicatedLinear

EXPERTS, HIDDEN, INNER = 6, 16, 8


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()):
        yield


def matrices(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        f"{expert}.{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }


def layer_of(top_k: int = 2, **more) -> FusedMoE:
    layer = FusedMoE(EXPERTS, top_k, HIDDEN, INNER, prefix="model.layers.0.mlp.experts", **more)
    assert layer.load_weights(matrices().items()) == {"w13_weight", "w2_weight"}
    return layer


def expected(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    given, out = matrices(), torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate, up, down = (given[f"{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            out[row] += weight * (down @ (F.silu(gate @ x[row]) * (up @ x[row])))
    return out


@pytest.fixture
def x():
    return torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def router_logits():
    return torch.randn(7, EXPERTS, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_chosen_experts_are_added_up_by_weight(renormalize, x, router_logits):
    weights, ids = router_logits.softmax(-1).topk(2)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    found = layer_of(renormalize=renormalize)(x, router_logits)
    torch.testing.assert_close(found, expected(x, weights, ids))


def test_a_function_of_the_models_own_chooses(x, router_logits):
    def last_two(hidden_states, gating_output, topk, renormalize):
        ids = torch.arange(EXPERTS - topk, EXPERTS, dtype=torch.int32).expand(len(hidden_states), topk)
        return torch.full(ids.shape, 0.25), ids

    found = layer_of(custom_routing_function=last_two)(x, router_logits)
    ids = torch.tensor([[EXPERTS - 2, EXPERTS - 1]] * len(x))
    torch.testing.assert_close(found, expected(x, torch.full(ids.shape, 0.25), ids))


def test_shared_experts_and_the_gate_are_part_of_it(x):
    gate = GateLinear(HIDDEN, EXPERTS, out_dtype=torch.float32)
    gate.weight.data = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(5))
    shared = ReplicatedLinear(HIDDEN, HIDDEN, bias=False, return_bias=False)
    shared.weight.data = torch.eye(HIDDEN)
    layer = FusedMoEFactory(EXPERTS, 2, HIDDEN, INNER, shared_experts=shared, gate=gate)
    layer.load_weights(matrices().items())
    weights, ids = fused_topk(x, x @ gate.weight.T, 2, renormalize=True)
    torch.testing.assert_close(layer(x), expected(x, weights, ids) + x)
    # They belong to the model around the layer.
    assert {name for name, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}


def test_scores_may_be_sigmoids_corrected_for_the_choice_only(router_logits):
    bias = torch.tensor([9.0, 0, 0, 0, 0, 9.0])
    weights, ids = fused_topk(
        router_logits, router_logits, 2, renormalize=False, scoring_func="sigmoid", e_score_correction_bias=bias
    )
    assert ids.sort(-1).values.tolist() == [[0, 5]] * len(router_logits)
    torch.testing.assert_close(weights, router_logits.sigmoid().gather(-1, ids))
    with pytest.raises(ModelFileError, match="'tanh'"):
        fused_topk(router_logits, router_logits, 2, renormalize=False, scoring_func="tanh")


def test_groups_are_chosen_first():
    # The best single expert is in the group whose second is poor; with a bias, groups count by their two best.
    logits = torch.tensor([[5.0, -9, 3, 2.9, 0, 0]])
    _, ids = grouped_topk(logits, logits, 2, renormalize=True, num_expert_group=3, topk_group=1)
    assert ids.tolist() == [[0, 1]]
    bias = torch.zeros(6)
    _, ids = grouped_topk(logits, logits, 2, True, 3, 1, scoring_func="sigmoid", e_score_correction_bias=bias)
    assert ids.tolist() == [[2, 3]]


def test_experts_come_one_by_one_or_all_in_one_tensor(x, router_logits):
    given = matrices()
    stacked = {
        part: torch.stack([given[f"{expert}.{part}.weight"] for expert in range(EXPERTS)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    fused = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
    whole = {
        "gate_up_proj": torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1),
        "down_proj": stacked["down_proj"],
    }
    assert fused.load_weights(whole.items()) == {"w13_weight", "w2_weight"}
    torch.testing.assert_close(fused(x, router_logits), layer_of()(x, router_logits))
    by_hand = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
    for _, stored, expert, shard in FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS):
        param = by_hand.w2_weight if shard == "w2" else by_hand.w13_weight
        name = stored.removeprefix("experts.") + "weight"
        param.weight_loader(param, given[name], name, shard_id=shard, expert_id=expert)
    torch.testing.assert_close(by_hand(x, router_logits), fused(x, router_logits))


def test_what_is_missing_or_unknown_is_noticed():
    given = matrices()
    layer = FusedMoE(EXPERTS, 2, HIDDEN, INNER)
    assert layer.load_weights([entry for entry in given.items() if entry[0] != "3.up_proj.weight"]) == {"w2_weight"}
    assert layer.load_weights([("3.up_proj.weight", given["3.up_proj.weight"])]) == {"w13_weight", "w2_weight"}
    for name in ("9.up_proj.weight", "1.side_proj.weight", "up_proj.scale"):
        with pytest.raises(ValueError, match=name):
            layer.load_weights([(name, torch.zeros(INNER, HIDDEN))])
    with pytest.raises(ValueError, match="its shape"):
        layer.load_weights([("1.up_proj.weight", torch.zeros(INNER + 1, HIDDEN))])


def test_more_experts_than_there_are_cannot_be_asked_for():
    with pytest.raises(ModelFileError, match="7 of 6 experts"):
        FusedMoE(EXPERTS, 7, HIDDEN, INNER)


def test_what_is_not_there_is_refused_by_name():
    for option in ({"enable_eplb": True}, {"has_bias": True}, {"num_redundant_experts": 2}, {"ep_size": 2}):
        with pytest.raises(ValueError, match=next(iter(option))):
            FusedMoE(EXPERTS, 2, HIDDEN, INNER, **option)


class Always(RoutingStrategy):
    def route_tokens(self, hidden_states, router_logits, top_k, indices_type=None):
        ids = torch.full((len(hidden_states), top_k), 4)
        return torch.full(ids.shape, 0.5), ids


def test_a_strategy_can_be_registered_and_chosen(monkeypatch, x, router_logits):
    monkeypatch.setattr(RoutingSimulator, "_routing_strategies", dict(RoutingSimulator._routing_strategies))
    RoutingSimulator.register_strategy("always four", Always())
    assert "always four" in RoutingSimulator.get_available_strategies()
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "always four")
    ids = torch.full((len(x), 2), 4)
    torch.testing.assert_close(layer_of()(x, router_logits), expected(x, torch.full(ids.shape, 0.5), ids))
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "nobody")
    with pytest.raises(ConfigError, match=r"'nobody'.*always four"):
        layer_of()(x, router_logits)
    with pytest.raises(TypeError, match="route_tokens"):
        RoutingSimulator.register_strategy("wrong", object())


@pytest.mark.parametrize("name", ["uniform_random", "normal_routing"])
def test_built_in_strategies_choose_different_experts(name, x, router_logits):
    weights, ids = RoutingSimulator.simulate_routing(x, router_logits, name, 3)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert 0 <= int(ids.min()) <= int(ids.max()) < EXPERTS
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(x)))


def test_the_gate_returns_the_format_it_is_asked_for():
    gate = GateLinear(HIDDEN, EXPERTS, params_dtype=torch.bfloat16)
    gate.set_out_dtype(torch.float32)
    logits, bias = gate(torch.randn(2, HIDDEN, dtype=torch.bfloat16))
    assert (logits.dtype, bias) == (torch.float32, None)
    with pytest.raises(ValueError, match="already"):
        gate.set_out_dtype(torch.bfloat16)
