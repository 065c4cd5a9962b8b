"""Model classes of plugins, from their registration to the class that is built (bugs B01 and B06)."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import run

import pytest

from hardpoint.testing import boot_in_child, make_plugin, plugin_environment
from plugin_scripts import run_script
from server_process import ServerProcess

pytestmark = pytest.mark.server

TOY = json.dumps({"architectures": ["ToyLM"]})
REGISTER = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("ToyLM", "p_model:ToyLM")
"""
IMPL = """
from vllm.model_executor.models.llama import LlamaForCausalLM
class ToyLM(LlamaForCausalLM):
    is_pooling_model = False
"""


def package(folder, impl=IMPL, register=REGISTER, version="1.0", **more):
    """A package that re-exports its class from a module of its own, and a module that registers it."""
    files = {"p_model/__init__.py": "from p_model.impl import ToyLM\n", "p_model/impl.py": impl, "p_toy.py": register}
    points = {"vllm.general_plugins": {"toy": "p_toy:register"}}
    return make_plugin(folder / "site", "p-model", {**files, **more}, points, version)


# What several scripts do: make a configuration, as often as asked, and tell what it was made of.
CONFIGURE = """
from pathlib import Path

def configure(**more):
    before = len(events("models", "inspect"))
    args = EngineArgs(model=sys.argv[1], hf_overrides={"architectures": ["ToyLM"]}, **more)
    chosen = args.create_engine_config().model_config.model_class
    [[*_, how, _, _]] = events("models", "inspect")[before:]
    return {"path": chosen.path, "pools": chosen.info["is_pooling_model"], "asked": "asked in" in how}
"""


# -- what is remembered (B06) ----------------------------------------------------------------------------------------


def test_a_record_is_good_until_anything_it_was_made_from_changes(tmp_path, tiny_llama):
    plugin = package(tmp_path)
    source = (
        CONFIGURE
        + """
impl, cache = Path(sys.argv[2]), Path(os.environ["HARDPOINT_CACHE"])
answer(configure())
answer(configure())
impl.write_text(impl.read_text().replace("False", "True"))
answer(configure())
[record] = (cache / "modelinfos").iterdir()
record.write_text("{")
answer(configure())
answer(configure())
record.unlink()
(cache / "modelinfos").rmdir()
(cache / "modelinfos").write_text("no folder")
answer(configure())
answer([sorted({e.role for e in ledger.entries(kind="call", key="general", name="toy")}), "torch" in sys.modules])
"""
    )
    variables = {"HARDPOINT_CACHE": str(tmp_path / "cache")}
    done = run_script(source, [plugin], tiny_llama, plugin.folder / "p_model" / "impl.py", **variables)
    *configured, (roles, has_torch) = done.answers
    assert [(one["pools"], one["asked"]) for one in configured] == [
        (False, True), (False, False), (True, True), (True, True), (True, False), (True, True),
    ]  # fmt: skip
    assert {one["path"] for one in configured} == {"p_model.impl:ToyLM"}
    assert roles == ["front_end", "inspector"], "the inspector runs the general plugins too"
    assert not has_torch


def test_two_starts_at_once_and_an_upgrade(tmp_path, tiny_llama):
    plugin = package(tmp_path)
    variables = {"HARDPOINT_CACHE": str(tmp_path / "cache")}

    def start(_):
        return run_script(CONFIGURE + "answer(configure())", [plugin], tiny_llama, **variables).answers[0]

    with ThreadPoolExecutor(2) as pool:
        assert [one["path"] for one in pool.map(start, range(2))] == ["p_model.impl:ToyLM"] * 2
    assert len(list((tmp_path / "cache" / "modelinfos").iterdir())) == 1
    assert not start(None)["asked"]
    # The same files under another version.
    shutil.rmtree(plugin.folder)
    package(tmp_path, version="1.1")
    assert start(None)["asked"]


# -- what a class must offer -----------------------------------------------------------------------------------------


def test_a_class_that_cannot_serve_is_refused_with_the_reason_and_asked_again_once_mended(tmp_path, tiny_llama):
    plugin = package(tmp_path, register=REGISTER + "    ModelRegistry.register_model('Gone', 'p_gone:Model')\n")
    source = (
        CONFIGURE
        + """
impl = Path(sys.argv[2])
good = impl.read_text()
for line in sys.argv[3:]:
    impl.write_text(good + line + "\\n")
    try:
        configure()
    except ValueError as error:
        answer([str(error), "".join(getattr(error, "__notes__", []))])
impl.write_text(good)
answer(configure())
"""
    )
    lines = [
        "    embed_input_ids = None",
        "    compute_logits = None",
        "print('looking for a driver'); import driver_that_is_gone",
    ]
    impl = plugin.folder / "p_model" / "impl.py"
    done = run_script(source, [plugin], tiny_llama, impl, *lines, HARDPOINT_CACHE=str(tmp_path / "cache"))
    *refused, mended = done.answers
    does_not = "ToyLM (p_model.impl:ToyLM) does not support --runner generate: it"
    expected = [
        f"{does_not} lacks embed_input_ids(input_ids) [from p-model 1.0, vllm.general_plugins: toy]",
        f"{does_not} lacks compute_logits(hidden_states) [from",
        "['ToyLM'] failed to be inspected. ToyLM: 'p_model:ToyLM': importing 'p_model' failed because "
        "'driver_that_is_gone' is not installed [from p-model 1.0, vllm.general_plugins: toy] Fix: install the package",
    ]
    for (said, _), wanted in zip(refused, expected, strict=True):
        assert wanted in said
    assert "looking for a driver\n" in refused[2][1]
    assert all(line.startswith("[inspector ") for line in refused[2][1].splitlines())
    assert "No module named 'driver_that_is_gone'" in done.output
    assert mended["asked"]


def test_a_server_that_cannot_have_the_class_ends_with_one_error(tmp_path, tiny_llama):
    broken = package(tmp_path, impl="import sys\nprint('no driver', file=sys.stderr)\nraise OSError('driver is old')\n")
    with ServerProcess(tiny_llama, "--hf-overrides", TOY, env=environment(broken)) as server:
        assert server.exit_status() == 1
        log = server.log()
        assert "hardpoint: error: Model architectures ['ToyLM'] failed to be inspected. ToyLM: 'p_model:ToyLM': " in log
        assert "raised OSError: driver is old" in log
        assert "from: p-model 1.0, vllm.general_plugins: toy" in log
        assert "[inspector " in log
        assert "] no driver" in log


def environment(*plugins):
    return {"PYTHONPATH": plugin_environment(plugins)["PYTHONPATH"]}


@pytest.mark.parametrize(
    ("name", "variables", "words"),
    [
        ("ToyLm", {}, ["did you mean ToyLM?", "supported are ToyLM, "]),
        ("ToyLM", {"VLLM_PLUGINS": "other"}, ["plugin 'toy' is left out: not named in VLLM_PLUGINS"]),
        ("ToyLM", {"BROKEN": "1"}, ["plugin 'toy' cannot be imported from 'p_toy:register': ZeroDivisionError"]),
    ],
)
def test_an_unknown_architecture_is_answered_with_what_may_be_meant(tmp_path, tiny_llama, name, variables, words):
    plugin = package(tmp_path, register="import os\n1 / (1 - int(os.environ.get('BROKEN', 0)))\n" + REGISTER)
    flags = ["--hf-overrides", json.dumps({"architectures": [name]})]
    done = run(
        [sys.executable, "-m", "hardpoint", "serve", str(tiny_llama), *flags],
        env=plugin_environment([plugin], **variables), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    for word in [f"Model architectures ['{name}'] are not supported for now", *words]:
        assert word in done.stderr


# -- registering -----------------------------------------------------------------------------------------------------


def test_every_wrong_registration_is_an_error_of_its_kind_that_ends_the_start(tmp_path):
    source = """
from vllm import ModelRegistry
from torch import nn
for name, cls in (
    (None, "a:B"), (nn.Module, "a:B"), ("A", "a.B"), ("A", "a:b:C"), ("A", ":C"), ("A", 5), ("A", nn.Linear(1, 1)),
    ("A", dict),
):
    try:
        ModelRegistry.register_model(name, cls)
    except Exception as error:
        answer([isinstance(error, TypeError), isinstance(error, ValueError), str(error)])
answer("A" in ModelRegistry.get_supported_archs())
"""
    *errors, registered = run_script(source, []).answers
    assert [kinds[:1] for kinds in errors] == [[True], [True], [False], [False], [False], [True], [True], [True]]
    assert all(kinds[1] for kinds in errors[2:5])
    assert "`model_arch` should be a string, not NoneType" in errors[0][2]
    assert "<module>:<class>" in errors[2][2]
    assert "does not derive from torch.nn.Module" in errors[7][2]
    assert not registered
    bad = package(tmp_path, register=REGISTER.replace("p_model:ToyLM", "p_model.ToyLM"))
    [stop] = boot_in_child("front_end", plugin_environment([bad])).stops
    assert "plugin 'toy' failed: RegistrationError: models entry 'ToyLM': 'p_model.ToyLM' is not a ref" in stop["what"]
    assert stop["origin"].startswith("p-model 1.0, vllm.general_plugins: toy, in front_end")


BY_CLASS = """
import os
def register():
    from hardpoint.extensions.ledger import ledger
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from p_model import ToyLM
    elsewhere = os.environ.get("ELSEWHERE") and "engine_core" in ledger.role
    ModelRegistry.register_model("ToyLM", LlamaForCausalLM if elsewhere else ToyLM)
    ModelRegistry.register_model("MistralForCausalLM", ToyLM)
"""
HALF = IMPL + "    supports_pp = True\n    def forward(self, input_ids, positions): return input_ids\n"


def test_a_class_given_as_one_is_looked_at_at_once_and_must_be_the_same_everywhere(tmp_path, tiny_llama):
    plugin = package(tmp_path, impl=HALF, register=BY_CLASS)
    source = """
args = dict(model=sys.argv[1], hf_overrides={"architectures": ["ToyLM"]})
answer([EngineArgs(**args).create_engine_config().model_config.model_class.path, events("models")])
os.environ["ELSEWHERE"] = "1"
try:
    LLM(**args)
except ValueError as error:
    answer(str(error))
"""
    done = run_script(source, [plugin], tiny_llama, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    (path, entries), refusal = done.answers
    assert path == "p_model.impl:ToyLM"
    assert [(kind, name) for kind, name, *_ in entries] == [("register", "ToyLM"), ("replace", "MistralForCausalLM")]
    lacks = "it declares supports_pp but lacks the argument intermediate_tensors of forward"
    [warning, *_] = [line for line in done.output.splitlines() if lacks in line]
    assert "model class ToyLM (p_model.impl:ToyLM): it declares" in warning
    replaced = "models entry 'MistralForCausalLM' is replaced: it was hardpoint.worker.models.llama:MistralForCausalLM"
    assert f"{replaced} (built in), now p_model.impl:ToyLM [from p-model 1.0, vllm.general_plugins: toy]" in done.output
    assert "ToyLM is hardpoint.worker.models.llama:LlamaForCausalLM in this process" in refusal
    assert "and p_model.impl:ToyLM in the front end (p-model 1.0, vllm.general_plugins: toy)" in refusal


def test_an_override_of_the_class_is_told_once_in_each_process_with_its_owner(tmp_path, tiny_llama):
    plugin = package(tmp_path, impl=IMPL + "    def compute_logits(self, h): return -super().compute_logits(h)\n")
    flags = ["--model-class-overrides", json.dumps({"LlamaForCausalLM": "p_model:ToyLM"})]
    with ServerProcess(tiny_llama, *flags, "--distributed-executor-backend", "mp", env=environment(plugin)) as server:
        server.wait_ready()
        assert server.complete().status_code == 200
        its = [e for e in server.ledger() if (e["kind"], e["name"]) == ("replace", "LlamaForCausalLM")]
        assert [entry["role"] for entry in its] == ["front_end", "engine_core", "worker"]
        assert {entry["origin"]["group"] for entry in its} == {"model_class_overrides"}
        assert server.log().count("models entry 'LlamaForCausalLM' is replaced") == 3
        assert "now p_model:ToyLM [from model_class_overrides: LlamaForCausalLM]" in server.log()
        assert "model class LlamaForCausalLM is p_model.impl:ToyLM" in server.log()


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_imports_the_classes_and_builds_the_model_it_is_given(tmp_path, tiny_llama):
    register = (
        REGISTER
        + """
    from vllm.model_executor.layers.layernorm import RMSNorm
    ModelRegistry.register_model("Gone", "p_gone:Model")
    ModelRegistry.register_model("Half", "p_model:Half")
    RMSNorm.register_oot(name="rms_norm")(type("Mine", (RMSNorm,), {}))
"""
    )
    impl = IMPL + "class Half(LlamaForCausalLM):\n    embed_input_ids = None\n"
    plugin = package(tmp_path, impl=impl, register=register)
    (plugin.folder / "p_model" / "__init__.py").write_text("from p_model.impl import *\n")
    words = ["plugins", "doctor", str(tiny_llama), "--hf-overrides", TOY, "-cc.custom_ops+", "+rmsnorm", "--json"]
    done = run(
        [sys.executable, "-m", "hardpoint", *words, "--timeout", "100"],
        env=plugin_environment([plugin], OMP_NUM_THREADS="1"),
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    by = "[from p-model 1.0, vllm.general_plugins: toy]"
    # How long imports take is told as well.
    assert {(one["what"], one["severity"], tuple(one["roles"])) for one in findings} >= {
        (f"Gone: 'p_gone:Model': there is no module 'p_gone' {by}", "error", ("inspector",)),
        (f"model class Half (p_model.impl:Half): it lacks embed_input_ids(input_ids) {by}", "warning", ("inspector",)),
        (
            "registered but never built: 'rms_norm' is an op's name, replacements go by class name: register it for "
            f"'RMSNorm' {by}",
            "warning",
            ("worker",),
        ),
        (
            "custom op 'rmsnorm' doesn't exist (or wasn't imported/registered): enabling it with '+rmsnorm' has no "
            "effect; did you mean +rms_norm?",
            "warning",
            ("worker",),
        ),
    }
    assert [one["severity"] for one in findings].count("error") == 1
    assert all(one["fix"] for one in findings)
