"""Models compiled by torch.compile say what they say otherwise; the graph is cut at attention only."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import CompilationConfig, VllmConfig
from hardpoint.testing import engine_here
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.layers.activation import SiluAndMul
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.rotary_embedding import RotaryEmbedding
from hardpoint.worker.models.compilation import ignore_torch_compile, support_torch_compile
from hardpoint.worker.models.compiling import compile_model

# Of torch's own modules, when they are first imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def said(model, **arguments):
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}, {"prompt_token_ids": [9] * 40}]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=3)
    with engine_here(model, **arguments) as llm:
        compiled = counters["stats"]["unique_graphs"]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        assert counters["stats"]["unique_graphs"] == compiled, "it compiles while it serves"
    return [{token: entry.logprob for token, entry in step.items()} for out in outputs for step in out.logprobs]


@pytest.fixture(scope="module")
def model(make_tiny_llama):
    return make_tiny_llama(num_hidden_layers=1)


def held_against(found, expected):
    assert len(found) == len(expected)
    for step, wanted in zip(found, expected, strict=True):
        assert step == pytest.approx(wanted, abs=1e-3)


def test_nothing_is_compiled_by_default(model):
    said(model)
    assert not counters["stats"]["unique_graphs"]


def test_a_compiled_model_says_the_same(model, caplog):
    expected = said(model)
    with caplog.at_level("INFO"):
        # What Inductor needs a compiler for, this traces and cuts in the same way.
        held_against(said(model, compilation_config={"mode": 3, "backend": "eager"}), expected)
    assert "LlamaModel is compiled with the backend eager" in caplog.text
    assert "the model is compiled in" in caplog.text
    assert counters["stats"]["unique_graphs"] > 1
    assert all("Attention.forward" in why for why in counters["graph_break"])


def config(backend, **more):
    found = VllmConfig()
    found.compilation_config = CompilationConfig(mode=3, backend=backend, **more)
    return found


@support_torch_compile
class Layers(torch.nn.Module):
    """What a decoder has besides matrix products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = RMSNorm(32), SiluAndMul()
        self.rotary = RotaryEmbedding(8, 8, 64, 10000.0, True, torch.float32)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, residual = self.norm(x, x * 2)
        turned, key = self.rotary(positions, x, residual)
        return self.act(torch.cat((turned, key), dim=-1))


def test_layers_compiled_by_inductor_compute_the_same():
    settings = config("inductor", inductor_compile_config={"cpp_cache_precompile_headers": False})
    settings.compilation_config.custom_ops = ["none"]
    with set_current_vllm_config(settings):
        layers = Layers()
    with torch.inference_mode():
        inputs = [(torch.randn(count, 32), torch.arange(count) + 3) for count in (5, 9)]
        expected = [layers(*given) for given in inputs]
        compile_model(layers, settings)
        found = [layers(*inputs[0])]
        compiled = counters["stats"]["unique_graphs"]
        found.append(layers(*inputs[1]))
    assert all(map(torch.allclose, found, expected))
    assert compiled == counters["stats"]["unique_graphs"], "another size is compiled anew"
    assert not counters["graph_break"]


@pytest.mark.parametrize("uncached", [False, True])
def test_inductor_leaves_its_cache_alone_when_told_to(monkeypatch, uncached):
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", str(int(uncached)))
    seen = []

    def stand_in(function, *, options, **others):  # Inductor itself takes half a minute
        inductor = torch._TorchCompileInductorWrapper(None, options, dynamic=True)
        seen.append(inductor.config.get("fx_graph_cache", True))
        return function

    monkeypatch.setattr(torch, "compile", stand_in)
    compile_model(support_torch_compile(type("Marked", (Inner,), {}))(), config("inductor"))
    assert seen == [not uncached]


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_only_marked_classes_are_compiled(caplog):
    marked = support_torch_compile(type("Marked", (Inner,), {}))
    ignored = ignore_torch_compile(type("Ignored", (marked,), {}))
    unwanted = support_torch_compile(enable_if=lambda config: False)(type("Unwanted", (Inner,), {}))
    parts = torch.nn.ModuleList([Inner(), marked(), ignored(), unwanted()])
    with caplog.at_level("WARNING"):
        compile_model(parts, config("eager"))
        assert ["forward" in vars(part) for part in parts] == [False, True, False, False]
        assert torch.equal(parts[1](torch.ones(2)), torch.full((2,), 2.0))
        compile_model(Inner(), config("eager"))
    assert "Inner is not marked with support_torch_compile: nothing is compiled" in caplog.text
