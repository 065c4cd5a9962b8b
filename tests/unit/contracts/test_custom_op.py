"""Replacing and switching ops: every form of the calls, every rule of the list, every error."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from hardpoint import platforms
from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import CompilationMode, VllmConfig
from hardpoint.contracts import custom_op
from hardpoint.contracts.custom_op import (
    CustomOp,
    PluggableLayer,
    maybe_get_oot_by_class,
    op_registry,
    op_registry_oot,
)
from hardpoint.contracts.platform import PlatformEnum
from hardpoint.extensions.registry import isolated, registry
from hardpoint.platforms.cpu import CpuPlatform


@pytest.fixture(autouse=True)
def fresh():
    known = dict(op_registry)
    with isolated():
        yield
    op_registry.clear()
    op_registry.update(known)
    platforms.reset_current_platform()


def make_op(name="my_op", class_name="MyOp"):
    """A new registered op that answers with the name of the method that ran."""

    def forward(method):
        return lambda self, x=None: method

    methods = ["native", "cuda", "hip", "cpu", "tpu", "xpu", "oot"]
    namespace = {f"forward_{method}": forward(f"forward_{method}") for method in methods}
    return CustomOp.register(name)(type(class_name, (CustomOp,), namespace))


def config(custom_ops=(), **compilation):
    made = VllmConfig()
    # As a platform with a compiler would leave it.
    made.compilation_config.__dict__.update({"custom_ops": list(custom_ops), **compilation})
    return made


def build(cls, custom_ops=(), **compilation):
    with set_current_vllm_config(config(custom_ops, **compilation)):
        return cls()


# Registration


def test_an_op_of_our_own_gets_a_name():
    op = CustomOp.register("my_op", dynamic_arg_dims={"x": 0})(type("MyOp", (CustomOp,), {}))
    assert op_registry["my_op"] is op
    assert (op.name, op._dynamic_arg_dims) == ("my_op", {"x": 0})
    layer = PluggableLayer.register("my_layer")(type("MyLayer", (PluggableLayer,), {}))
    assert (op_registry["my_layer"], layer.name) == (layer, "my_layer")


@pytest.mark.parametrize("base", [CustomOp, PluggableLayer])
def test_a_name_that_is_taken_is_refused(base):
    make_op("my_op")
    with pytest.raises(AssertionError, match="Duplicate op name: my_op"):
        base.register("my_op")(type("Other", (base,), {}))


def test_every_form_of_register_oot():
    op = make_op()

    @op.register_oot
    class Bare(op):
        pass

    assert op_registry_oot["MyOp"] is Bare
    assert Bare.name == "MyOp"
    del op_registry_oot["MyOp"]

    @op.register_oot()
    class Called(op):
        pass

    assert op_registry_oot.pop("MyOp") is Called

    @CustomOp.register_oot(name="MyOp")
    class Named(op):
        pass

    assert op_registry_oot["MyOp"] is Named
    assert Named.name == "MyOp"
    del op_registry_oot["MyOp"]
    CustomOp.register_oot(_decorated_op_cls=Named, name="MyOp")
    assert isinstance(build(op), Named)


def test_what_is_not_a_class_is_refused():
    op = make_op()
    for wrong in ("MyOp", 5, object()):
        with pytest.raises(TypeError, match="Decorator can only be applied to classes"):
            op.register_oot(wrong)
    with pytest.raises(TypeError, match="Decorator can only be applied to classes"):
        op.register_oot()(len)


@pytest.mark.parametrize(("root", "noun"), [(CustomOp, "op"), (PluggableLayer, "layer")])
def test_a_second_replacement_is_refused_and_the_same_again_is_not(root, noun):
    base = root.register("base")(type("Base", (root,), {}))
    one, two = type("One", (base,), {}), type("Two", (base,), {})
    base.register_oot(one)
    base.register_oot(one)
    with pytest.raises(AssertionError, match=f"Duplicate {noun} name: Base") as caught:
        base.register_oot(two)
    assert "One" in str(caught.value)
    assert "Two" in str(caught.value)
    assert op_registry_oot["Base"] is one


def test_a_replacement_must_derive_from_what_it_replaces():
    op = make_op()
    with pytest.raises(TypeError, match="does not derive"):
        op.register_oot(type("Stranger", (CustomOp,), {}))
    CustomOp.register_oot(name="MyOp")(type("Stranger", (CustomOp,), {}))
    with pytest.raises(TypeError, match="does not derive"):
        build(op)


def test_replacements_show_in_the_table_and_the_dict_of_plugins_reaches_it():
    op = make_op()
    mine = type("Mine", (op,), {})
    op_registry_oot["MyOp"] = mine
    assert registry("oot_ops").load("MyOp") is mine
    layer = PluggableLayer.register("my_layer")(type("MyLayer", (PluggableLayer,), {}))
    layer.register_oot(type("Other", (layer,), {}))
    assert registry("pluggable_layers").names() == ["MyLayer"]
    assert list(op_registry_oot) == ["MyOp", "MyLayer"]
    assert op_registry_oot.pop("MyLayer").__name__ == "Other"
    assert "MyLayer" not in op_registry_oot
    op_registry_oot.clear()
    assert registry("oot_ops").names() == []


# Replacement


def test_construction_builds_the_replacement():
    op = make_op()

    @op.register_oot
    class Mine(op):
        def __init__(self, size=3, *, flavour="plain"):
            super().__init__()
            self.size, self.flavour = size, flavour

    with set_current_vllm_config(config()):
        built = op(5, flavour="odd")
    assert type(built) is Mine
    assert isinstance(built, op)
    assert (built.size, built.flavour) == (5, "odd")
    assert maybe_get_oot_by_class(op) is Mine
    assert type(build(Mine)) is Mine


def test_only_the_named_class_is_replaced():
    op = make_op()
    derived = type("Derived", (op,), {})
    op.register_oot(type("Mine", (op,), {}))
    assert type(build(derived)) is derived
    namesake = make_op("other_op", "MyOp")
    assert type(build(namesake)) is namesake


def test_a_replacement_of_the_same_name():
    op = make_op()
    mine = op.register_oot(type("MyOp", (op,), {}))
    assert type(build(op)) is mine
    assert type(build(mine)) is mine


def test_a_later_registration_leaves_what_is_built_alone():
    op = make_op()
    before = build(op)
    op.register_oot(type("Mine", (op,), {}))
    assert type(before) is op
    assert type(copy.deepcopy(before)) in (op, op_registry_oot["MyOp"])


def test_layers_are_replaced_without_switches():
    @PluggableLayer.register("my_layer")
    class MyLayer(PluggableLayer):
        def __init__(self, size):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(size))

        def forward(self):
            return "ours"

    @MyLayer.register_oot
    class Mine(MyLayer):
        def forward(self):
            return "theirs"

    built = MyLayer(3)
    assert (type(built), built(), built.weight.shape[0]) == (Mine, "theirs", 3)


# Dispatch


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (PlatformEnum.ROCM, "forward_hip"),
        (PlatformEnum.CPU, "forward_cpu"),
        (PlatformEnum.TPU, "forward_tpu"),
        (PlatformEnum.XPU, "forward_xpu"),
        (PlatformEnum.OOT, "forward_oot"),
        (PlatformEnum.CUDA, "forward_cuda"),
        (PlatformEnum.UNSPECIFIED, "forward_cuda"),
    ],
)
def test_the_platform_names_the_method(kind, method):
    platforms.set_current_platform(type("P", (CpuPlatform,), {"_enum": kind}))
    op = make_op()
    assert build(op, ["all"])() == method
    assert build(op, ["none"])() == "forward_native"


def test_defaults_of_the_methods():
    class Plain(CustomOp):
        def forward_native(self, x):
            return x + 1

    op = CustomOp.register("plain")(Plain)(**{})
    for name in ("forward_cpu", "forward_tpu", "forward_xpu", "forward_oot"):
        assert getattr(op, name)(1) == 2
    for name in ("forward_cuda", "forward_hip"):
        with pytest.raises(NotImplementedError):
            getattr(op, name)(1)
    with pytest.raises(NotImplementedError):
        CustomOp.register("bare")(type("Bare", (CustomOp,), {}))().forward_native()


def test_the_choice_is_made_once():
    op = make_op()
    settings = config(["none"])
    with set_current_vllm_config(settings):
        built = op()
        settings.compilation_config.__dict__["custom_ops"] = ["all"]
        assert built() == "forward_native"


def test_enforce_enable_wins_over_the_list():
    op = make_op()
    with set_current_vllm_config(config(["none", "-my_op"])):
        assert CustomOp.__call__(type("Forced", (op,), {
            "__init__": lambda self: CustomOp.__init__(self, enforce_enable=True)
        })()) == "forward_cpu"  # fmt: skip


def test_outside_of_a_config_the_choice_waits_for_the_first_call():
    op = make_op()
    built = op()
    with set_current_vllm_config(config(["none"])):
        assert built() == "forward_native"
    assert built() == "forward_native"
    assert op()() == "forward_cpu"


def test_an_op_without_a_name_works(caplog):
    class Nameless(CustomOp):
        def forward_native(self):
            return "native"

        def forward_cpu(self):
            return "cpu"

    assert build(Nameless, ["all"])() == "cpu"
    assert build(Nameless, ["none"])() == "native"
    assert build(Nameless, ["none", "+Nameless"])() == "cpu"


# The list of switches


def runs(cls, custom_ops, **compilation):
    return build(cls, custom_ops, **compilation)() == "forward_cpu"


@pytest.mark.parametrize(
    ("custom_ops", "ours", "theirs"),
    [
        (["all"], True, True),
        (["none"], False, False),
        (["none", "+my_op"], True, True),
        (["none", "+MyOp"], False, True),
        (["none", "+my_op", "+MyOp"], True, True),
        (["all", "-MyOp"], True, False),
        (["all", "-my_op"], False, False),
    ],
)
def test_both_names_reach_a_replacement(custom_ops, ours, theirs):
    op = make_op()
    assert runs(op, custom_ops) is ours
    op.register_oot(type("Mine", (op,), {}))
    assert runs(op, custom_ops) is theirs


@pytest.mark.parametrize("register", ["on the class", "by name"])
def test_both_names_reach_a_replacement_of_a_class_that_has_no_name_of_its_own(register):
    op = make_op()
    variant = type("Variant", (op,), {})
    mine = type("Mine", (variant,), {})
    if register == "on the class":
        variant.register_oot(mine)
    else:
        CustomOp.register_oot(name="Variant")(mine)
    assert runs(variant, ["none", "+Variant"])
    assert runs(variant, ["none", "+my_op"])
    assert not runs(variant, ["none", "+MyOp"])


@pytest.mark.parametrize(
    ("mode", "backend", "on"),
    [
        (CompilationMode.NONE, "", True),
        (CompilationMode.NONE, "inductor", True),
        (CompilationMode.VLLM_COMPILE, "eager", True),
        (CompilationMode.VLLM_COMPILE, "", False),
        (CompilationMode.VLLM_COMPILE, "inductor", False),
    ],
)
def test_the_base_mode_follows_compilation(mode, backend, on):
    assert runs(make_op(), [], mode=mode, backend=backend) is on


def test_contradictions_are_refused():
    op = make_op()
    op.register_oot(type("Mine", (op,), {}))
    for plus, minus in itertools.product(["MyOp", "my_op"], repeat=2):
        with pytest.raises(ValueError, match=r"MyOp|my_op"):
            build(op, ["none", f"+{plus}", f"-{minus}"])
    with pytest.raises(ValueError, match="one of 'all' and 'none'"):
        build(op, ["all", "none"])


def test_counts_are_kept_by_name():
    op = make_op()
    op.register_oot(type("Mine", (op,), {}))
    other = make_op("other_op", "Other")
    settings = config(["none", "+MyOp"])
    with set_current_vllm_config(settings):
        op(), op(), other()
    assert dict(settings.compilation_config.enabled_custom_ops) == {"MyOp": 2}
    assert dict(settings.compilation_config.disabled_custom_ops) == {"other_op": 1}


def test_builds_are_logged_with_what_they_run():
    op = make_op()
    mine = op.register_oot(type("Mine", (op,), {}))
    custom_op.build_log.clear()
    build(op, ["all"]), build(op, ["all"])
    entry = custom_op.build_log.builds[mine]
    assert (entry.asked, entry.count, entry.method, entry.enabled) == (op, 2, "forward_cpu", True)


def test_native_code_is_compiled_only_when_models_are(monkeypatch):
    compiled = []
    monkeypatch.setattr(custom_op, "torch_compile", lambda fn, **how: compiled.append(how) or fn)
    op = make_op()
    native = type("Native", (op,), {"__init__": lambda self: CustomOp.__init__(self, compile_native=True)})
    build(native, ["none"], mode=CompilationMode.NONE)
    build(native, ["none"], mode=CompilationMode.VLLM_COMPILE, backend="eager")
    build(native, ["all"], mode=CompilationMode.VLLM_COMPILE)
    assert not compiled
    build(native, ["none"], mode=CompilationMode.VLLM_COMPILE)
    assert compiled == [{"dynamic": True, "backend": "inductor"}]
