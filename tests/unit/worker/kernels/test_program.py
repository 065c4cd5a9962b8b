"""A step as one call: the same numbers as layer by layer, and never where somebody changed a layer."""

from __future__ import annotations

import random

import pytest
import tiny_ggufs
import torch
from paged_model import PagedModel
from tiny_checkpoints import BASE, build, save

from hardpoint.contracts.quantization import QuantizeMethodBase
from hardpoint.worker.forward_context import set_forward_context
from hardpoint.worker.kernels import program
from hardpoint.worker.kernels.program import ProgramOfModel
from hardpoint.worker.layers.activation import SiluAndMul
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.linear import UnquantizedLinearMethod
from hardpoint.worker.lora.methods import AdaptedMethod, CurrentRows, Rows
from hardpoint.worker.lora.placing import Update
from hardpoint.worker.models.llama import LlamaDecoderLayer
from hardpoint.worker.quantization.gguf import PackedLinearMethod

MODELS = {
    "llama": ("llama", "LlamaConfig", BASE),
    "qwen2": ("qwen2", "Qwen2Config", BASE),
    "qwen3": ("qwen3", "Qwen3Config", {**BASE, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("gemma", "GemmaConfig", {**BASE, "head_dim": 32}),
    "gemma3": (
        "gemma3", "Gemma3TextConfig",
        {**BASE, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3", "Phi3Config", {**BASE, "sliding_window": 30}),
}  # fmt: skip


class Stepper:
    """A model whose steps are computed in both ways."""

    def __init__(self, path, **options):
        self.paged = PagedModel(path, **{"dtype": "auto", **options})
        self.config, self.model = self.paged.config, self.paged.model
        self.programs = ProgramOfModel(self.model, self.config, dict.fromkeys(self.paged.layers, 0))

    @torch.inference_mode()
    def hidden(self, rows, *, by_layer):
        common = self.paged.metadata(rows, self.config.cache_config.block_size)
        built = {name: builder.build(0, common) for name, builder in self.paged.builders.items()}
        ids = torch.tensor([token for _, tokens, _ in rows for token in tokens], dtype=torch.int32)
        positions = torch.tensor([start + i for start, tokens, _ in rows for i in range(len(tokens))])
        current = None if by_layer else self.programs.current()
        if current is not None:
            return current.run(ids, positions, [next(iter(built.values()))])
        with set_forward_context(built, self.config, len(ids)):
            return self.model(input_ids=ids, positions=positions)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    def make(name):
        architecture, kind, settings = MODELS[name]
        return tiny_ggufs.write(
            build(kind, settings), architecture, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0"
        )

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same model with plain weights."""
    return save(build(*MODELS["llama"][1:]), tmp_path_factory.mktemp("plain"))


@pytest.fixture(params=["quantised", "plain"])
def stepper(request, path, folder, library):
    return Stepper(path("llama")) if request.param == "quantised" else Stepper(folder, dtype="float32")


TOKENS = random.Random(3).choices(range(3, 320), k=120)
ROWS = [(0, TOKENS[:70], [1, 2, 3, 4, 5]), (0, TOKENS[70:], [6, 7, 8, 9])]


@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_the_numbers_of_the_layers(name, path, library, monkeypatch):
    # Several panels: later tokens find earlier ones of the same step in the cache.
    monkeypatch.setattr(program, "MOST_TOKENS", 32)
    model = Stepper(path(name))
    assert model.programs.current() is not None
    assert torch.equal(model.hidden(ROWS, by_layer=False), model.hidden(ROWS, by_layer=True))
    follow = [(70, [5], ROWS[0][2]), (50, [9], ROWS[1][2])]
    assert torch.equal(model.hidden(follow, by_layer=False), model.hidden(follow, by_layer=True))


@pytest.mark.parametrize("name", MODELS)
def test_models_of_plain_weights_have_programs_too(name, library, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "MOST_TOKENS", 32)
    _, kind, settings = MODELS[name]
    model = Stepper(save(build(kind, settings), tmp_path), dtype="float32")
    assert model.programs.current() is not None
    assert torch.equal(model.hidden(ROWS, by_layer=False), model.hidden(ROWS, by_layer=True))
    follow = [(70, [5], ROWS[0][2]), (50, [9], ROWS[1][2])]
    assert torch.equal(model.hidden(follow, by_layer=False), model.hidden(follow, by_layer=True))


def test_an_id_that_is_no_token_is_refused(stepper):
    with pytest.raises(IndexError, match="token"):
        stepper.hidden([(0, [3, 100_000], [1])], by_layer=False)


def changed(layer, factor=3.0):
    """A forward that does something else."""
    original = layer.forward
    return lambda *args, **kwargs: (
        tuple(part * factor for part in found)
        if isinstance(found := original(*args, **kwargs), tuple)
        else found * factor
    )


def output_of(model):
    return model.model.layers[0].self_attn.o_proj


class Doubling(QuantizeMethodBase):
    """Wraps a layer's method."""

    def __init__(self, base):
        self.base = base

    def create_weights(self, layer, *sizes, **attributes):
        raise NotImplementedError

    def apply(self, layer, x, bias=None):
        return 2 * self.base.apply(layer, x, bias)


def wrap_method(model, patch):
    output_of(model).quant_method = Doubling(output_of(model).quant_method)


def patch_method(model, patch):
    for cls in (UnquantizedLinearMethod, PackedLinearMethod):
        original = cls.apply
        patch.setattr(cls, "apply", lambda self, layer, x, bias=None, own=original: 2 * own(self, layer, x, bias))


def method_of_one_layer(model, patch):
    method = output_of(model).quant_method
    original = method.apply
    patch.setattr(method, "apply", lambda layer, x, bias=None: 2 * original(layer, x, bias))


def new_weight(model, patch):
    weight = output_of(model).weight
    output_of(model).weight = torch.nn.Parameter(2 * weight, requires_grad=False)


def new_numbers(model, patch):
    output_of(model).weight.data = 2 * output_of(model).weight


def numbers_loaded_again(model, patch):
    output_of(model).weight.data.copy_(2 * output_of(model).weight)


def norm_of(model):
    return model.model.layers[1].input_layernorm


def replace_module(model, patch):
    class Other(RMSNorm):
        def forward(self, x, residual=None):
            found = super().forward(x, residual)
            return (found[0] * 3.0, found[1])

    mine = Other(norm_of(model).hidden_size, norm_of(model).variance_epsilon)
    mine.weight = norm_of(model).weight
    model.model.layers[1].input_layernorm = mine


def patch_class(model, patch):
    original = RMSNorm.forward
    patch.setattr(RMSNorm, "forward", lambda self, *args: tuple(part * 1.5 for part in original(self, *args))
                  if len(args) > 1 else original(self, *args))  # fmt: skip


def patch_native(model, patch):
    patch.setattr(SiluAndMul, "forward_native", lambda self, x: x[..., : x.shape[-1] // 2] * 2)


def patch_glue(model, patch):
    original = LlamaDecoderLayer.forward
    patch.setattr(LlamaDecoderLayer, "forward", lambda self, *args: tuple(2 * part for part in original(self, *args)))


CHANGES = {
    "a hook": lambda model, patch: norm_of(model).register_forward_hook(lambda module, args, out: (out[0] * 2, out[1])),
    "a hook before": lambda model, patch: model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: (args[0] * 2,)
    ),
    "a forward of its own": lambda model, patch: setattr(norm_of(model), "forward", changed(norm_of(model))),
    "a module": replace_module,
    "a parameter": lambda model, patch: setattr(
        norm_of(model), "weight", torch.nn.Parameter(norm_of(model).weight * 2, requires_grad=False)
    ),
    "a layer's quantisation method": wrap_method,
    "the quantisation methods": patch_method,
    "a method of one layer": method_of_one_layer,
    "a layer's weight": new_weight,
    "a weight's numbers": new_numbers,
    "a weight loaded again": numbers_loaded_again,
    "a norm's numbers": lambda model, patch: setattr(norm_of(model).weight, "data", norm_of(model).weight * 2),
    "a weight in place": lambda model, patch: norm_of(model).weight.data.mul_(2),
    "a class": patch_class,
    "a reference implementation": patch_native,
    "the code between layers": patch_glue,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_after_recording_is_obeyed(name, stepper, monkeypatch):
    before = stepper.hidden(ROWS, by_layer=False)
    CHANGES[name](stepper.model, monkeypatch)
    found = stepper.hidden(ROWS, by_layer=False)
    assert not torch.equal(found, before)
    assert torch.equal(found, stepper.hidden(ROWS, by_layer=True))


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_before_recording_is_obeyed(name, stepper, monkeypatch):
    plain = stepper
    before = plain.hidden(ROWS, by_layer=False)
    CHANGES[name](plain.model, monkeypatch)
    plain.programs = ProgramOfModel(plain.model, plain.config, dict.fromkeys(plain.paged.layers, 0))
    found = plain.hidden(ROWS, by_layer=False)
    assert not torch.equal(found, before)
    assert torch.equal(found, plain.hidden(ROWS, by_layer=True))


def test_layers_with_adapters_are_not_recorded_but_do_not_end_a_program(stepper):
    layer, rows = output_of(stepper.model), CurrentRows()
    before = stepper.hidden(ROWS, by_layer=False)
    layer.quant_method = AdaptedMethod(layer.quant_method, rows)
    # Nobody has an adapter in this step.
    assert stepper.programs.current() is not None
    assert torch.equal(stepper.hidden(ROWS, by_layer=False), before)
    again = ProgramOfModel(stepper.model, stepper.config, dict.fromkeys(stepper.paged.layers, 0))
    assert again.current() is None
    rows.count = sum(len(tokens) for _, tokens, _ in ROWS)
    rows.parts = [Rows(1, None)]
    layer.quant_method.updates["linear"][1] = [Update(torch.randn(2, 64), torch.randn(64, 2), 0)]
    assert not torch.equal(stepper.hidden(ROWS, by_layer=True), before)


def test_a_model_of_somebody_else_computes_layer_by_layer(library):
    class Foreign(torch.nn.Module):
        def forward(self, input_ids, positions):
            return input_ids.float().unsqueeze(-1)

    assert ProgramOfModel(Foreign(), PagedConfig, {}).current() is None


class PagedConfig:
    """What is asked of a configuration."""

    class compilation_config:
        mode = 0

    class model_config:
        max_model_len = 10
