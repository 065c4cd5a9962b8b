"""What model classes load their weights with."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hardpoint.worker.distributed import parallel_state
from hardpoint.worker.layers.parameters import default_weight_loader, replace_parameter, set_weight_attrs
from hardpoint.worker.models.loading import (
    AutoWeightsLoader,
    PPMissingLayer,
    StageMissingLayer,
    WeightsMapper,
    extract_layer_index,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    maybe_remap_kv_scale_name,
)


class Tree(nn.Module):
    """A module with parameters at every depth."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        self.register_buffer("steps", torch.zeros(1))


def weights(*names, fill=1.0):
    shapes = {"bias": (2,), "scale": (2,), "steps": (1,)}
    return [(name, torch.full(shapes.get(name.rpartition(".")[2], (2, 2)), fill)) for name in names]


ALL = ["scale", "inner.0.weight", "inner.0.bias", "inner.1.weight"]


def test_names_lead_through_the_modules():
    tree = Tree()
    assert AutoWeightsLoader(tree).load_weights(weights(*ALL, "steps")) == {*ALL, "steps"}
    assert all((parameter == 1).all() for parameter in tree.parameters())
    assert tree.steps.item() == 1


def test_a_module_with_its_own_way_is_given_all_below_it():
    class Own(nn.Module):
        def load_weights(self, weights):
            self.got = [(name, float(tensor.mean())) for name, tensor in weights]
            return {"fused"}

    tree = Tree()
    tree.own = Own()
    given = weights("own.a.b", "own.c", "scale", "own.d")
    assert AutoWeightsLoader(tree).load_weights(given) == {"own.fused", "scale"}
    # A later run of its names is another call; nothing is collected in memory.
    assert tree.own.got == [("d", 1.0)]


@pytest.mark.parametrize("name", ["inner.5.weight", "outer", "scale.more", "inner.0.gamma"])
def test_a_name_that_leads_nowhere_is_refused(name):
    with pytest.raises(ValueError, match=re.escape(repr(name.removeprefix("scale.")))):
        AutoWeightsLoader(Tree()).load_weights([(name, torch.ones(2))])


def test_what_may_be_missing_or_skipped():
    tree = Tree()
    loader = AutoWeightsLoader(
        tree,
        skip_prefixes=["inner.1."],
        skip_substrs=["0.bias"],
        ignore_unexpected_prefixes=["vision."],
        ignore_unexpected_suffixes=[".extra"],
    )
    extra = weights("vision.a.weight", "inner.0.extra", "inner.0.rotary_emb.inv_freq")
    assert loader.load_weights([*weights(*ALL), *extra]) == {"scale", "inner.0.weight"}
    assert (tree.inner[1].weight != 1).all()


def test_parameters_load_themselves():
    tree, calls = Tree(), []
    tree.scale.weight_loader = lambda parameter, tensor, shard=None: calls.append((parameter is tree.scale, shard))
    mapper = WeightsMapper(orig_to_new_stacked={"left": ("scale", "l"), "right": ("scale", "r")})
    AutoWeightsLoader(tree).load_weights([("left", torch.ones(1)), ("right", torch.ones(1))], mapper=mapper)
    AutoWeightsLoader(tree).load_weights(weights("scale"))
    assert calls == [(True, "l"), (True, "r"), (True, None)]


def test_layers_of_other_stages_take_nothing():
    tree = Tree()
    tree.away = PPMissingLayer()
    tree.left_out = StageMissingLayer("vision tower", nn.Linear(2, 2))
    given = weights("away.weight", "left_out.weight", "scale")
    assert AutoWeightsLoader(tree).load_weights(given) == {"scale"}
    assert is_pp_missing_parameter("away.weight", tree)
    assert not is_pp_missing_parameter("scale", tree)
    assert not is_pp_missing_parameter("awayer.weight", tree)
    assert tree.away(5, 6) == 5
    assert not list(tree.left_out.parameters())
    with pytest.raises(RuntimeError, match="vision tower"):
        tree.left_out(1)


def test_names_are_mapped_in_order():
    mapper = WeightsMapper(
        orig_to_new_renaming={"whole.name": "model.renamed", "drop.me": None},
        orig_to_new_regex={r"h\.(\d+)\.": r"layers.\1."},
        orig_to_new_substr={"attention": "self_attn", ".rotary": None},
        orig_to_new_prefix={"transformer.": "model.", "score.": None},
        orig_to_new_suffix={".gamma": ".weight", ".num_batches": None},
    )
    cases = {
        "whole.name": "model.renamed",
        "drop.me": None,
        "transformer.h.3.attention.q.gamma": "model.layers.3.self_attn.q.weight",
        "transformer.h.3.rotary.inv": None,
        "score.weight": None,
        "x.num_batches": None,
        "gamma.x": "gamma.x",
    }
    assert {name: mapper.map_name(name) for name in cases} == cases
    assert mapper.apply_list(["score.weight", "transformer.x"]) == ["model.x"]
    assert mapper.apply_dict({"score.weight": 1, "transformer.x": 2}) == {"model.x": 2}
    assert [name for name, _ in mapper.apply([("score.w", 1), ("transformer.x", 2)])] == ["model.x"]


def test_mappers_join_and_the_right_one_wins():
    one = WeightsMapper(orig_to_new_prefix={"a.": "x.", "b.": "y."})
    both = one | WeightsMapper(orig_to_new_prefix={"b.": "z."}, orig_to_new_substr={"old": "new"})
    assert [both.map_name(name) for name in ("a.old", "b.old")] == ["x.new", "z.new"]
    assert one.map_name("b.old") == "y.old"


def test_stacked_names_keep_their_shard():
    mapper = WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q"), ".up_proj": (".gate_up_proj", 1)})
    assert mapper.map_to_shard("l.0.q_proj.weight") == ("l.0.qkv_proj.weight", "q")
    assert mapper.map_to_shard("l.0.o_proj.weight") == ("l.0.o_proj.weight", None)
    (entry,) = mapper.apply([("l.0.up_proj.weight", torch.ones(1))])
    assert (entry[0], entry[1].loaded_shard_id) == ("l.0.gate_up_proj.weight", 1)


def test_layers_are_built_for_this_stage_only(monkeypatch):
    def build(prefix):
        layer = nn.Linear(1, 1)
        layer.prefix = prefix
        return layer

    start, end, layers = make_layers(3, build, "model.layers")
    assert (start, end) == (0, 3)
    assert [layer.prefix for layer in layers] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    monkeypatch.setitem(parallel_state._groups, "pp", SimpleNamespace(rank_in_group=1, world_size=2))
    start, end, layers = make_layers(4, build, "layers")
    assert (start, end, len(layers)) == (2, 4, 4)
    assert [isinstance(layer, PPMissingLayer) for layer in layers] == [True, True, False, False]


def test_small_helpers():
    assert (maybe_prefix("", "model"), maybe_prefix("a", "model")) == ("model", "a.model")
    assert extract_layer_index("model.layers.12.self_attn") == 12
    assert extract_layer_index("layers.3.attn.1", num_attn_module=2) == 7
    for wrong in ("model.norm", "layers.1.experts.2"):
        with pytest.raises(AssertionError, match="integer"):
            extract_layer_index(wrong)
    made = make_empty_intermediate_tensors_factory(["a", "b"], 8)(3, torch.bfloat16, torch.device("cpu"))
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == dict.fromkeys(
        "ab", ((3, 8), torch.bfloat16)
    )
    scales = {"layers.0.self_attn.attn.k_scale": None}
    assert maybe_remap_kv_scale_name("layers.0.self_attn.k_proj.k_scale", scales) == "layers.0.self_attn.attn.k_scale"
    assert maybe_remap_kv_scale_name("layers.0.self_attn.v_proj.v_scale", scales) is None
    assert maybe_remap_kv_scale_name("layers.0.mlp.weight", scales) == "layers.0.mlp.weight"


def test_parameter_attributes():
    parameter = nn.Parameter(torch.zeros(2), requires_grad=False)
    set_weight_attrs(parameter, {"output_dim": 0})
    assert parameter.output_dim == 0
    with pytest.raises(AssertionError, match="output_dim"):
        set_weight_attrs(parameter, {"output_dim": 1})
    layer = nn.Module()
    layer.weight = parameter
    replace_parameter(layer, "weight", torch.ones(3))
    assert (layer.weight.tolist(), layer.weight.output_dim) == ([1, 1, 1], 0)
    single = nn.Parameter(torch.zeros(1), requires_grad=False)
    default_weight_loader(single, torch.tensor(4.0))
    assert single.item() == 4
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        default_weight_loader(parameter, torch.ones(3))
