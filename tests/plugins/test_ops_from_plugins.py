"""Ops and layers that plugins replace, on real engines (bug B11): they run, or it is said why not."""

from __future__ import annotations

import json

import pytest

from hardpoint.testing import boot_in_child, make_plugin, plugin_environment
from plugin_scripts import run_script
from server_process import ServerProcess

pytestmark = pytest.mark.server

LAYERS = 2  # of the tiny model
PER_STEP = 2 * LAYERS + 1

COUNTING = """
from vllm.model_executor.layers.layernorm import RMSNorm

CALLS = {"cpu": 0, "native": 0}

class CountingRMSNorm(RMSNorm):
    factor = 1

    def forward_cpu(self, x, residual=None):
        CALLS["cpu"] += 1
        found = super().forward_native(x, residual)
        return found * self.factor if residual is None else (found[0] * self.factor, found[1])

    def forward_native(self, x, residual=None):
        CALLS["native"] += 1
        return super().forward_native(x, residual)

class Extension:
    def start_counting(self):
        CALLS.update(cpu=0, native=0)

    def calls(self):
        return dict(CALLS)

    def give_zeros(self):
        CountingRMSNorm.factor = 0
"""
REGISTER = """
def register():
    RMSNorm.register_oot(CountingRMSNorm)
"""


def make(folder, source, name="op", group="vllm.general_plugins", point="register"):
    """A plugin `p-NAME` with one entry point NAME."""
    return make_plugin(folder / name, f"p-{name}", source, {group: {name: f"p_{name}:{point}"}})


# -- the custom_ops list ---------------------------------------------------------------------------------------------

SWITCHES = {
    "nothing": None,
    "none": ["none"],
    "key": ["none", "+RMSNorm"],
    "op name": ["none", "+rms_norm"],
    "both": ["none", "+rms_norm", "+RMSNorm"],
    "off": ["all", "-RMSNorm"],
    "off by op name": ["all", "-rms_norm"],
    "nowhere": ["none", "+RMSNrom"],
}
EACH_SWITCH = """
import p_op
from vllm.model_executor.custom_op import op_registry_oot

def start(listed):
    return LLM(sys.argv[1], compilation_config={"custom_ops": listed} if listed else None, dtype="float32")

op_registry_oot.pop("RMSNorm")
llm = start(None)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
answer([tokens(llm, 3), llm.generate("The", params)[0].outputs[0].text])
p_op.register()

for listed in (["+RMSNorm", "-RMSNorm"], ["+RMSNorm", "-rms_norm"]):
    try:
        start(listed)
    except ValueError as error:
        answer(str(error))

for name, listed in json.loads(sys.argv[2]).items():
    before = len(events("oot_ops"))
    llm = start(listed)
    p_op.CALLS.update(cpu=0, native=0)
    answer([name, tokens(llm, 3), p_op.CALLS, events("oot_ops")[before:]])
"""


@pytest.fixture(scope="module")
def switched(tmp_path_factory, tiny_llama):
    """What the script says, and what it writes."""
    plugin = make(tmp_path_factory.mktemp("switched"), COUNTING + REGISTER)
    done = run_script(EACH_SWITCH, [plugin], tiny_llama, json.dumps(SWITCHES))
    return done.answers, done.output


@pytest.fixture(scope="module")
def plain(switched):
    """What the model says without the op: three tokens after some, and the text after "The"."""
    return switched[0][0]


@pytest.fixture(scope="module")
def cases(switched):
    """Name of a list of switches -> tokens, calls of each method, ledger entries of out-of-tree ops."""
    return {name: more for name, *more in switched[0][3:]}


@pytest.mark.parametrize("name", ["nothing", "key", "op name", "both"])
def test_a_norm_that_is_on_runs_in_every_layer_of_every_step(cases, name):
    _, calls, entries = cases[name]
    assert calls == {"cpu": 3 * PER_STEP, "native": 0}
    [[kind, key, detail, _, owner]] = entries
    assert (kind, key, owner) == ("override", "RMSNorm", "p-op 1.0, vllm.general_plugins: op")
    assert detail == f"p_op.CountingRMSNorm in place of RMSNorm, built {PER_STEP} times, runs forward_cpu"


@pytest.mark.parametrize("name", ["none", "off", "off by op name", "nowhere"])
def test_a_norm_that_is_off_runs_its_native_method(cases, name):
    _, calls, entries = cases[name]
    assert calls == {"cpu": 0, "native": 3 * PER_STEP}
    assert any(kind == "override" and detail.endswith("runs forward_native") for kind, _, detail, *_ in entries)


def test_every_switch_gives_the_tokens_of_the_plain_model(cases, plain):
    assert {tuple(ids) for ids, _, _ in cases.values()} == {tuple(plain[0])}


def test_one_that_nobody_switched_off_by_name_is_reported_with_the_fix(cases, switched):
    for name in SWITCHES:
        warnings = [entry for entry in cases[name][2] if entry[:2] == ["warn", "RMSNorm"]]
        assert bool(warnings) == (name in ("none", "nowhere"))
        for _, _, detail, fix, _ in warnings:
            assert "CountingRMSNorm replaces RMSNorm but is switched off" in detail
            assert fix == "add +RMSNorm to custom_ops"
    assert switched[1].count("CountingRMSNorm replaces RMSNorm but is switched off") == 2


def test_a_switch_that_matches_nothing_is_one_warning_with_the_near_miss(cases, switched):
    [warning] = [entry for entry in cases["nowhere"][2] if entry[1] == "RMSNrom"]
    assert "custom op 'RMSNrom' doesn't exist" in warning[2]
    assert warning[3] == "write +RMSNorm in custom_ops"
    assert switched[1].count("custom op 'RMSNrom' doesn't exist") == 1


def test_on_and_off_together_is_an_error_that_names_the_op(switched):
    first, second = switched[0][1:3]
    assert "both enables and disables 'RMSNorm'" in first
    assert "cannot both enable and disable the same operation: +RMSNorm and -rms_norm" in second


# -- where and how it is registered ----------------------------------------------------------------------------------

LAYER = """
from vllm.model_executor.layers.linear import RowParallelLinear

@RowParallelLinear.register_oot
class Turning(RowParallelLinear):
    def forward(self, x):
        found, bias = super().forward(x)
        return found * -3, bias

def register(): pass
"""


@pytest.fixture(scope="module")
def replaced(tmp_path_factory, tiny_llama):
    """An op registered by a platform detector alone, and a layer."""
    folder = tmp_path_factory.mktemp("replaced")
    detector = COUNTING + "def detect():\n    RMSNorm.register_oot(CountingRMSNorm)\n"
    plugins = [make(folder, detector, group="vllm.platform_plugins", point="detect"), make(folder, LAYER, "layer")]
    source = """
import p_op
llm = LLM(sys.argv[1], dtype="float32")
p_op.CALLS.update(cpu=0, native=0)
answer([tokens(llm, 3), p_op.CALLS["cpu"], events("oot_ops"), events("pluggable_layers")])
"""
    [answer] = run_script(source, plugins, tiny_llama).answers
    return answer


def test_an_op_registered_by_a_platform_detector_alone_is_used(replaced):
    _, calls, entries, _ = replaced
    assert calls == 3 * PER_STEP
    assert [(kind, owner) for kind, *_, owner in entries] == [
        ("register", "p-op 1.0, vllm.platform_plugins: op"),
        ("override", "p-op 1.0, vllm.platform_plugins: op"),
    ]


def test_a_layer_is_replaced_whole(replaced, plain):
    ids, _, _, entries = replaced
    assert ids != plain[0]
    assert [entry[:3] for entry in entries] == [
        ["register", "RowParallelLinear", "p_layer:Turning"],
        ["override", "RowParallelLinear", "p_layer.Turning in place of RowParallelLinear, built 4 times"],
    ]


def test_what_is_registered_under_another_name_or_too_late_is_told(tmp_path, tiny_llama):
    register = """
class Another(RMSNorm): pass

def register():
    RMSNorm.register_oot(name="rms_norm")(CountingRMSNorm)
    RMSNorm.register_oot(name="RmsNorm")(Another)
"""
    source = """
import p_op
llm = LLM(sys.argv[1])
p_op.RMSNorm.register_oot(type("Late", (p_op.RMSNorm,), {}))
tokens(llm, 2)
answer([p_op.CALLS, events("oot_ops", "warn")])
"""
    done = run_script(source, [make(tmp_path, COUNTING + register)], tiny_llama)
    [(calls, entries)] = done.answers
    assert calls == {"cpu": 0, "native": 0}
    assert {entry[-1] for entry in entries} == {"p-op 1.0, vllm.general_plugins: op"}
    assert {entry[3] for entry in entries} == {"use @RMSNorm.register_oot"}
    for key, hint in (("rms_norm", "register it for 'RMSNorm'"), ("RmsNorm", "did you mean 'RMSNorm'?")):
        [detail] = [detail for _, name, detail, *_ in entries if name == key]
        assert hint in detail
        assert done.output.count(f"oot_ops entry {key!r} is registered but never built") == 1
    assert "Late takes the place of RMSNorm in models built from now on: one is built already" in done.output


def test_the_same_class_twice_changes_nothing_and_another_is_a_clear_error(tmp_path):
    twice = make(tmp_path, COUNTING + REGISTER + "    RMSNorm.register_oot(CountingRMSNorm)\n")
    second = make(tmp_path, COUNTING.replace("Counting", "Other") + REGISTER.replace("Counting", "Other"), "other")
    report = boot_in_child("worker", plugin_environment([twice, second]))
    assert [entry.name for entry in report.find("register", key="oot_ops")] == ["RMSNorm"]
    [stop] = report.stops
    said = "plugin 'other' failed: DuplicateAssertion: Duplicate op name: RMSNorm is taken by p_op.CountingRMSNorm"
    assert said in stop["what"]
    assert "and p_other.OtherRMSNorm wants it too" in stop["what"]
    assert stop["origin"].startswith("p-other 1.0, vllm.general_plugins: other")


# -- on a server whose worker is a process of its own ----------------------------------------------------------------


def test_the_worker_process_runs_it_in_every_step_and_what_it_gives_counts(tmp_path, tiny_llama, plain):
    plugin = make(tmp_path, COUNTING + REGISTER)
    variables = {"PYTHONPATH": plugin.environment()["PYTHONPATH"], "VLLM_SERVER_DEV_MODE": "1"}
    flags = ["--distributed-executor-backend", "mp", "--worker-extension-cls", "p_op.Extension", "--dtype", "float32"]
    flags += ["--compilation-config.custom_ops+", "none", "-cc.custom_ops+", "+RMSNorm", "-cc.custom_ops+", "+quant"]
    with ServerProcess(tiny_llama, *flags, env=variables) as server:
        server.wait_ready()

        def ask(method: str):
            return server.http.post("/collective_rpc", json={"method": method}).json()["results"]

        ask("start_counting")
        assert text(server) == plain[1]
        assert ask("calls") == [{"cpu": 8 * PER_STEP, "native": 0}]
        ask("give_zeros")
        assert text(server) != plain[1]
        its = [entry for entry in server.ledger() if entry["key"] == "oot_ops" and entry["role"] == "worker"]
        assert [entry["kind"] for entry in its] == ["register", "warn", "override"]
        assert "custom op 'quant' doesn't exist" in server.log()


def text(server: ServerProcess) -> str:
    return server.complete(ignore_eos=True).json()["choices"][0]["text"]


def test_a_list_in_json_reaches_the_worker(tmp_path, tiny_llama):
    """The two forms that need no server: what the flags make of the list."""
    source = """
from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.config.engine_args import AsyncEngineArgs

for words in (
    ["--compilation-config", '{"custom_ops": ["none", "+RMSNorm"]}'],
    ["-cc", '{"custom_ops": ["none", "+RMSNorm"]}'],
    ["-cc.custom_ops", '["none", "+RMSNorm"]'],
    ["-cc.custom_ops+", "none", "-cc.custom_ops+", "+RMSNorm"],
    ["--compilation_config.custom_ops+=none", "-cc.custom_ops+=+RMSNorm"],
):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    config = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", sys.argv[1], *words])).create_engine_config()
    answer(config.compilation_config.custom_ops)
"""
    assert run_script(source, [], tiny_llama).answers == [["none", "+RMSNorm"]] * 5
