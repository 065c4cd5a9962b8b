"""Model loaders, quantisation methods and attention backends of plugins, on real engines."""

from __future__ import annotations

import json

import pytest

from hardpoint.testing import make_plugin
from plugin_scripts import run_script

pytestmark = pytest.mark.server

# Each part turns some sign around, so that the model says something else.
SOURCE = """
import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

class Loader(DefaultModelLoader):
    def load_weights(self, model, model_config):
        super().load_weights(model, model_config)
        model.lm_head.weight.data.neg_()

class Method(UnquantizedLinearMethod):
    def apply(self, layer, x, bias=None):
        return -super().apply(layer, x, bias)

class Quant(QuantizationConfig):
    def get_name(self): return "p_quant"
    def get_supported_act_dtypes(self): return [torch.float32]
    @classmethod
    def get_min_capability(cls): return -1
    @staticmethod
    def get_config_filenames(): return []
    @classmethod
    def from_config(cls, config): return cls()
    def get_quant_method(self, layer, prefix):
        return Method() if isinstance(layer, LinearBase) else None

class Impl(CPUAttentionBackendImpl):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).neg_()

class Backend(CPUAttentionBackend):
    @staticmethod
    def get_name(): return "P_ATTN"
    @staticmethod
    def get_impl_cls(): return Impl

class Custom(Backend):
    @staticmethod
    def get_name(): return "CUSTOM"

class InPlace(Backend):
    @staticmethod
    def get_name(): return "CPU_ATTN"

def register():
    register_model_loader("p_load")(Loader)
    register_quantization_config("p_quant")(Quant)
    register_backend("P_ATTN", "p_parts.Backend")
    register_backend(AttentionBackendEnum.CUSTOM)(Custom)
    register_backend("P_GONE", "p_gone.Backend")

def replace_built_ins():
    register_model_loader("safetensors")(Loader)
    register_quantization_config("gguf")(Quant)
    register_backend(AttentionBackendEnum.CPU_ATTN, "p_parts.InPlace")
"""
USES = {
    "load": {"load_format": "p_load"},
    "quant": {"quantization": "p_quant"},
    "backend": {"attention_backend": "P_ATTN"},
    "custom": {"attention_backend": "custom"},
}
SCRIPT = """
import p_parts

ROWS = ("model_loaders", "quantization_methods", "attention_backends")

def start(**more):
    before = len(events("model_loaders")), len(events("quantization_methods")), len(events("attention_backends"))
    found = tokens(LLM(sys.argv[1], dtype="float32", **more))
    return found, [event for row, count in zip(ROWS, before) for event in events(row)[count:]]

answer(start())
for more in json.loads(sys.argv[2]).values():
    answer(start(**more))

for more in json.loads(sys.argv[3]):
    try:
        start(**more)
    except Exception as error:
        answer([type(error).__name__, isinstance(error, ValueError), str(error)])

for call in (
    lambda: p_parts.register_model_loader("x")(dict),
    lambda: p_parts.register_quantization_config("x")(dict),
    lambda: p_parts.register_backend("P_ATTN", "p_parts.Backend"),
    lambda: p_parts.register_backend("not a name", "p_parts.Backend"),
):
    try:
        call()
    except ValueError as error:
        answer(str(error))

p_parts.replace_built_ins()
answer(start(load_format="safetensors"))
"""
REFUSED = [
    {"load_format": "p_laod"},
    {"quantization": "p_qaunt"},
    {"attention_backend": "P_ATN"},
    {"attention_backend": "P_GONE"},
    {"attention_backend": "FLASHINFER"},
]


@pytest.fixture(scope="module")
def said(tmp_path_factory, tiny_llama):
    plugin = make_plugin(
        tmp_path_factory.mktemp("parts"), "p-parts", SOURCE, {"vllm.general_plugins": {"parts": "p_parts:register"}}
    )
    return run_script(SCRIPT, [plugin], tiny_llama, json.dumps(USES), json.dumps(REFUSED))


@pytest.fixture(scope="module")
def plain(said):
    ids, events = said.answers[0]
    assert events == []
    return ids


OWNER = "p-parts 1.0, vllm.general_plugins: parts"


@pytest.mark.parametrize(
    ("use", "name", "what"),
    [
        ("load", "p_load", "p_parts:Loader loads the model"),
        ("quant", "p_quant", "p_parts:Quant keeps the weights"),
        ("backend", "P_ATTN", "p_parts:Backend attends"),
        ("custom", "CUSTOM", "p_parts:Custom attends"),
    ],
)
def test_what_is_chosen_changes_the_answer_and_is_in_the_ledger(said, plain, use, name, what):
    ids, events = said.answers[1 + list(USES).index(use)]
    assert ids != plain
    assert events == [["override", name, what, "", OWNER]]


def test_what_cannot_be_chosen_is_refused_with_the_near_miss_or_the_owner(said):
    load, quant, backend, gone, free = said.answers[5:10]
    assert "load_format 'p_laod' is not supported; did you mean p_load?" in load[2]
    assert "quantization 'p_qaunt' is not supported; did you mean p_quant?" in quant[2]
    assert "attention backend 'P_ATN' is not supported; did you mean P_ATTN?" in backend[2]
    assert "'p_gone:Backend': there is no module 'p_gone'" in gone[2]
    assert f"[from {OWNER}]" in gone[2]
    assert "attention backend 'FLASHINFER' is not supported" in free[2]
    assert [one[1] for one in (load, quant, backend, free)] == [True] * 4


def test_wrong_registrations_are_value_errors(said):
    loader, quant, twice, name = said.answers[10:14]
    assert "builtins.dict does not derive from hardpoint.contracts.model_loader.BaseModelLoader" in loader
    assert "builtins.dict does not derive from hardpoint.contracts.quantization.QuantizationConfig" in quant
    assert "attention backend 'P_ATTN' exists already" in twice
    assert "'not a name' cannot be the name of an attention backend" in name


def test_a_built_in_part_that_is_replaced_is_warned_of_and_used(said, plain):
    ids, events = said.answers[14]
    assert ids != plain
    assert {(kind, name) for kind, name, *_ in events} == {("override", "safetensors"), ("override", "CPU_ATTN")}
    for row, name in (
        ("model_loaders", "safetensors"), ("quantization_methods", "gguf"), ("attention_backends", "CPU_ATTN")
    ):  # fmt: skip
        [line] = [line for line in said.output.splitlines() if f"{row} entry {name!r} is replaced" in line]
        assert line.startswith("WARNING")
        assert "(built in), now p_parts:" in line
        assert line.endswith(f"[from {OWNER}]")
