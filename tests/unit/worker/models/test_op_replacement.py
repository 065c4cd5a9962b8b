"""Replaced ops inside a real model, and what is said about switches and registrations that hit nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from hardpoint import log
from hardpoint.contracts.custom_op import CustomOp
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.registry import isolated
from hardpoint.worker.kernels.library import kernels
from hardpoint.worker.layers.activation import SiluAndMul
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.linear import RowParallelLinear
from hardpoint.worker.layers.rotary_embedding import RotaryEmbedding

TEXT = [5, 300, 17, 99, 250]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(log, "_seen", set())
    before = len(ledger.entries())
    with isolated():
        yield before


@pytest.fixture
def said(caplog, monkeypatch):
    """Everything logged by the report at INFO and above, as (level, text)."""
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    caplog.set_level("INFO", logger="hardpoint.worker.models.op_report")

    def read(level="WARNING"):
        records = (r for r in caplog.records if r.name == "hardpoint.worker.models.op_report")
        return [r.getMessage() for r in records if r.levelname == level]

    return read


def counting_norm(factor=1):
    class CountingRMSNorm(RMSNorm):
        calls = 0

        def forward_native(self, x, residual=None):
            type(self).calls += 1
            found = super().forward_native(x, residual)
            return found * factor if residual is None else (found[0] * factor, found[1])

    return CountingRMSNorm


@pytest.fixture
def in_torch(monkeypatch):
    """Layers compute in torch, as the replacements do: what they replace must then be equal to the bit."""
    monkeypatch.setenv("HARDPOINT_CPU_KERNELS", "off")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def test_a_replaced_norm_runs_twice_a_layer_and_once_at_the_end(tiny_llama, paged_model, in_torch):
    expected = paged_model(tiny_llama).whole(TEXT)
    mine = RMSNorm.register_oot(counting_norm())
    model = paged_model(tiny_llama)
    assert torch.equal(model.whole(TEXT), expected)
    assert mine.calls == 2 * 2 + 1
    model.whole(TEXT)
    assert mine.calls == 2 * (2 * 2 + 1)


def test_a_norm_that_gives_zeros_changes_the_answer(tiny_llama, paged_model):
    RMSNorm.register_oot(counting_norm(factor=0))
    assert (paged_model(tiny_llama).whole(TEXT) == 0).all()


def test_what_was_replaced_is_in_the_ledger(tiny_llama, paged_model, fresh):
    RMSNorm.register_oot(counting_norm())
    RowParallelLinear.register_oot(type("MyRow", (RowParallelLinear,), {}))
    paged_model(tiny_llama)
    entries = [entry for entry in ledger.entries(kind="override")[-2:]]
    assert [(entry.key, entry.name) for entry in entries] == [
        ("oot_ops", "RMSNorm"),
        ("pluggable_layers", "RowParallelLinear"),
    ]
    assert "CountingRMSNorm in place of RMSNorm, built 5 times, runs forward_cpu" in entries[0].detail
    assert "MyRow in place of RowParallelLinear, built 4 times" in entries[1].detail


@pytest.mark.parametrize("switch", ["+rms_norm", "+RMSNorm"])
def test_either_switch_reaches_it(switch, tiny_llama, paged_model, said):
    mine = RMSNorm.register_oot(counting_norm())
    model = paged_model(tiny_llama, compilation_config={"custom_ops": ["none", switch]})
    assert model.config.compilation_config.enabled_custom_ops == {"RMSNorm": 5}
    assert {module._forward_method.__name__ for module in model.model.modules() if isinstance(module, mine)} == {
        "forward_cpu"
    }
    assert said() == []


def test_one_that_is_left_off_is_reported(tiny_llama, paged_model, said):
    RMSNorm.register_oot(counting_norm())
    paged_model(tiny_llama, compilation_config={"custom_ops": ["none"]})
    assert said() == []
    (line,) = said("INFO")
    assert "CountingRMSNorm replaces RMSNorm but is switched off" in line
    assert "+RMSNorm" in line
    assert ledger.entries(kind="warn")[-1].fix == "add +RMSNorm to custom_ops"


@pytest.mark.parametrize("switch", ["-RMSNorm", "-rms_norm"])
def test_one_that_was_switched_off_by_name_is_no_surprise(switch, tiny_llama, paged_model, said, fresh):
    RMSNorm.register_oot(counting_norm())
    paged_model(tiny_llama, compilation_config={"custom_ops": ["all", switch]})
    assert said() == said("INFO") == []
    kinds = [entry.kind for entry in ledger.entries(key="oot_ops")[-2:]]
    assert kinds == ["register", "override"]


@pytest.mark.parametrize(
    ("switch", "hint"),
    [
        ("+RMSNorm", "did you mean +rms_norm?"),
        ("-rmsnorm", "did you mean -rms_norm?"),
        ("+RMSNrom", "did you mean +rms_norm?"),
        ("+silu_and_mull", "did you mean +silu_and_mul?"),
        ("+quant_fp8", "doesn't exist"),
        ("+gelu_and_mul", "not present in model"),
    ],
)
def test_a_switch_that_matches_nothing_is_one_warning(switch, hint, tiny_llama, paged_model, said):
    paged_model(tiny_llama, compilation_config={"custom_ops": ["all", switch]})
    (line,) = said()
    assert repr(switch[1:]) in line
    assert hint in line


def test_a_registration_under_the_op_name_is_one_warning(tiny_llama, paged_model, said):
    mine = CustomOp.register_oot(name="rms_norm")(counting_norm())
    paged_model(tiny_llama).whole(TEXT)
    assert mine.calls == 0
    (line,) = said()
    assert "'rms_norm' is registered but never built" in line
    assert "'RMSNorm'" in line
    assert ledger.entries(key="oot_ops")[-1].fix == "use @RMSNorm.register_oot"


def test_a_misspelt_registration_is_one_warning(tiny_llama, paged_model, said):
    CustomOp.register_oot(name="RmsNorm")(counting_norm())
    paged_model(tiny_llama)
    (line,) = said()
    assert "did you mean 'RMSNorm'?" in line


def test_a_replacement_for_what_a_model_does_not_have_is_said_in_passing(tiny_llama, paged_model, said):
    from hardpoint.worker.layers.activation import GeluAndMul

    GeluAndMul.register_oot(type("MyGelu", (GeluAndMul,), {}))
    paged_model(tiny_llama)
    assert said() == []
    (line,) = said("INFO")
    assert "this model has no GeluAndMul" in line
    last = ledger.entries(key="oot_ops")[-1]
    assert (last.kind, last.name, last.fix) == ("skip", "GeluAndMul", "nothing, if other models have one")


def test_a_replacement_after_the_model_was_built_is_told(tiny_llama, paged_model, caplog, monkeypatch):
    paged_model(tiny_llama)
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    RMSNorm.register_oot(counting_norm())
    assert "takes the place of RMSNorm in models built from now on" in caplog.messages[-1]


def test_what_derives_from_a_replaced_class_is_named(tiny_llama, paged_model, said, monkeypatch):
    import hardpoint.worker.models.llama as llama

    class OwnNorm(RMSNorm):
        pass

    RMSNorm.register_oot(counting_norm())
    original = llama.LlamaModel.__init__

    def with_extra(self, **kwargs):
        original(self, **kwargs)
        self.extra = OwnNorm(4)

    monkeypatch.setattr(llama.LlamaModel, "__init__", with_extra)
    paged_model(tiny_llama, load_format="dummy")
    assert any("not what derives from it" in line and "OwnNorm" in line for line in said("INFO"))


def test_the_rotary_layer_and_the_activation_can_be_replaced(tiny_llama, paged_model, in_torch):
    expected = paged_model(tiny_llama).whole(TEXT)
    seen = []

    @RotaryEmbedding.register_oot
    class MyRotary(RotaryEmbedding):
        def forward_cpu(self, positions, query, key=None):
            seen.append("rotary")
            return self.forward_native(positions, query, key)

    @SiluAndMul.register_oot
    class MySilu(SiluAndMul):
        def forward_cpu(self, x):
            seen.append("silu")
            return self.forward_native(x)

    assert torch.equal(paged_model(tiny_llama).whole(TEXT), expected)
    assert sorted(seen) == ["rotary"] * 2 + ["silu"] * 2
