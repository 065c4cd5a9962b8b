import argparse
import importlib.util
import json
import re

import pytest

from hardpoint.cli import plugins
from hardpoint.extensions import loading
from hardpoint.testing import make_plugin

GOOD = """
from hardpoint.extensions.registry import registry
def register():
    registry("models").register("MyNet", "p_good:Net")
def __getattr__(name):
    if name != "Net":
        raise AttributeError(name)
    from hardpoint.worker.models.llama import LlamaForCausalLM
    return LlamaForCausalLM
"""
BAD = """
def raises():
    raise ValueError("boom")
def module_class(): pass
"""


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    for variable in ("VLLM_PLUGINS", "HARDPOINT_PLUGINS_DENY", "HARDPOINT_PLUGIN_POLICY"):
        monkeypatch.delenv(variable, raising=False)

    def call(*words):
        parser = argparse.ArgumentParser()
        plugins.add_parser(parser.add_subparsers())
        args = parser.parse_args(["plugins", *words])
        loading.reset()
        status = args.run(args)
        out, err = capsys.readouterr()
        return status, out, err

    yield call
    loading.reset()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make a plugin that this process and its children find."""
    folders = []

    def make(name, source, entry_points, version="1.0"):
        plugin = make_plugin(tmp_path / name, name, source, entry_points, version)
        folders.append(str(plugin.folder))
        monkeypatch.setenv("PYTHONPATH", ":".join(folders))
        monkeypatch.syspath_prepend(str(plugin.folder))

    return make


def test_list_names_every_kind_and_what_is_installed(run, installed, monkeypatch):
    installed("p-good", GOOD, {"vllm.general_plugins": {"good": "p_good:register", "other": "p_good:register"}})
    monkeypatch.setenv("VLLM_PLUGINS", "good")
    status, out, _ = run("list")
    assert status == 0
    assert "good = p_good:register  (p-good 1.0)  loads" in out
    assert "other = p_good:register  (p-good 1.0)  left out: not named in VLLM_PLUGINS" in out
    for word in ("LlamaForCausalLM", "[planned]", "--worker-cls", "check_and_update_config"):
        assert word in out
    status, out, _ = run("list", "--json")
    assert {"groups", "registries", "config_hooks", "platform_hooks"} <= set(json.loads(out))


def test_why_tells_what_happened_in_each_role(run, installed):
    installed("p-good", GOOD, {"vllm.general_plugins": {"good": "p_good:register"}})
    status, out, _ = run("why", "models", "MyNet")
    assert status == 0
    for role in ("front_end", "engine_core", "worker", "inspector"):
        assert f"{role}:" in out
    assert out.count("register  p_good:Net [p-good 1.0, vllm.general_plugins: good]") == 4
    status, out, _ = run("why", "vllm.general_plugins", "good", "--json")
    assert {event["kind"] for event in json.loads(out)["events"]} == {"discover", "load", "call"}


def test_why_knows_built_in_entries_and_corrects_spelling(run):
    status, out, _ = run("why", "models", "LlamaForCausalLM")
    assert (status, "built in, hardpoint.worker.models.llama:LlamaForCausalLM" in out) == (0, True)
    status, _, err = run("why", "modls", "X")
    assert status == 2
    assert "did you mean models?" in err
    status, _, err = run("why", "models", "LlamaForCasualLM")
    assert status == 1
    assert "LlamaForCausalLM" in err


def test_keys_are_named_once_each_and_all_of_them(run):
    _, _, err = run("why", "qqqqqq", "X")
    named = err.partition("keys are: ")[2].strip().split(", ")
    assert len(named) == len(set(named))
    assert {"models", "logits_processors", "worker_cls", "config", "patches"} <= set(named)


def test_what_is_missing_is_named_and_nothing_else(run, capsys):
    with pytest.raises(SystemExit):
        run("why")
    assert capsys.readouterr().err.strip().endswith("required: key, name")


def test_doctor_finds_nothing_wrong_where_nothing_is(run, installed):
    installed("p-good", GOOD, {"vllm.general_plugins": {"good": "p_good:register"}})
    status, out, _ = run("doctor")
    assert status == 0
    assert out.splitlines()[-1] == "no fault found"


def finding(out, words):
    (line,) = [line for line in out.splitlines() if re.search(words, line)]
    return line


def test_doctor_explains_each_fault_in_one_line_with_its_fix(run, installed, monkeypatch):
    heavy = "import time\ntime.sleep(0.6)\nfrom hardpoint.extensions.registry import registry\n"
    heavy += "def f(): registry('models').register('LlamaForCausalLM', 'a:B')\n"
    installed("p-import", "import not_there\n", {"vllm.general_plugins": {"imports": "p_import:f"}})
    installed("p-bad", BAD, {"vllm.stat_logger_plugins": {"wrong": "p_bad:module_class"}})
    installed("p-heavy", heavy, {"vllm.general_plugins": {"heavy": "p_heavy:f", "left": "p_heavy:f"}})
    installed("p-same", heavy, {"vllm.general_plugins": {"heavy": "p_heavy:f"}})
    monkeypatch.setenv("VLLM_PLUGINS", "imports,wrong,heavy,haevy")
    status, out, _ = run("doctor")
    assert status == 1
    lines = {
        "import failure": finding(out, "not_there"),
        "wrong object": finding(out, "'wrong'"),
        "duplicate": finding(out, "twice, from"),
        "built-in replaced": finding(out, "replaces hardpoint.worker.models.llama"),
        "near miss": finding(out, "'haevy'"),
        "dropped": finding(out, "'left' is left out"),
        "slow": finding(out, r"takes \d+ s in each process"),
    }
    assert all("Fix: " in line for line in lines.values())
    assert lines["import failure"].startswith("ERROR: ")
    assert "(front_end, engine_core, worker, inspector)" in lines["import failure"]
    assert "(front_end)" in lines["wrong object"]
    assert lines["dropped"].startswith("note: ")


def test_doctor_names_a_function_that_raises(run, installed):
    installed("p-bad", BAD, {"vllm.general_plugins": {"bad": "p_bad:raises"}})
    status, out, _ = run("doctor", "--json")
    assert status == 1
    (found,) = json.loads(out)["findings"]
    assert found["severity"] == "error"
    assert "'bad' failed: ValueError: boom" in found["what"]
    assert "p-bad 1.0" in found["fix"]


def test_doctor_checks_the_values_of_flags(run):
    status, out, _ = run("doctor", "--worker-cls", "not_there.Worker", "--tool-parser-plugin", "mine.py")
    assert status == 1
    assert "there is no module 'not_there'" in finding(out, "Worker")
    assert "--tool-parser-plugin 'mine.py' cannot be used: there is no file" in out


def test_doctor_can_be_strict(run, installed, monkeypatch):
    installed("p-import", "import not_there\n", {"vllm.general_plugins": {"imports": "p_import:f"}})
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "compatible")
    status, out, _ = run("doctor", "--plugin-policy", "strict")
    assert status == 1
    assert out.count("not_there") == 1


@pytest.fixture
def model_folder(tmp_path):
    """A folder that a configuration can be made of, without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


PATCH = """
def register():
    from hardpoint.platforms import current_platform
    platform = type(current_platform)
    original = platform.check_and_update_config.__func__
    def patched(cls, vllm_config):
        original(cls, vllm_config)
        if vllm_config.scheduler_config.policy == "fcfs":
            vllm_config.scheduler_config.policy = "priority"
    platform.check_and_update_config = classmethod(patched)
"""


def test_why_names_who_wrote_a_config_field(run, installed, model_folder):
    status, out, _ = run("why", "config", "parallel_config.worker_cls", "--", model_folder)
    assert status == 0
    assert "'auto' -> 'hardpoint.worker.device_worker.Worker'" in out
    installed("p-patch", PATCH, {"vllm.general_plugins": {"patch": "p_patch:register"}})
    status, out, _ = run("why", "config", "scheduler_config.policy", "--", model_folder)
    assert "'fcfs' -> 'priority'" in out
    assert "p-patch 1.0, vllm.general_plugins: patch" in out


def test_doctor_makes_the_config_of_serve_flags(run, model_folder):
    status, out, _ = run("doctor", "--", model_folder, "--scheduler-cls", "not_there.Scheduler")
    assert status == 1
    assert "(engine_core)" in finding(out, "ERROR: 'not_there.Scheduler'")
    assert "scheduler_config.scheduler_cls is 'not_there.Scheduler'" in finding(out, "front_end, worker")
    status, out, _ = run("doctor", "--", model_folder + "-missing")
    assert status == 1
    assert "cannot be found" in finding(out, "-missing")


@pytest.mark.parametrize(
    "words", [["--json", "MODEL", "--dtype", "float32"], ["MODEL", "--dtype", "float32", "--json"]]
)
def test_own_flags_may_stand_among_those_of_serve(run, model_folder, words):
    status, out, _ = run("doctor", *[model_folder if word == "MODEL" else word for word in words])
    assert (status, json.loads(out)["healthy"]) == (0, True)


def test_doctor_corrects_a_misspelt_serve_flag(run, model_folder):
    status, out, _ = run("doctor", model_folder, "--max-model-leng", "3")
    assert status == 1
    assert "did you mean --max-model-len?" in finding(out, "--max-model-leng")


SETTINGS = """
from dataclasses import dataclass
from hardpoint.extensions.plugin_config import declare, get_plugin_config
@declare("acme", flags=True)
@dataclass
class Settings:
    threshold: float = 0.5
def register():
    from hardpoint.extensions.registry import registry
    registry("models").register(f"Net{get_plugin_config('acme').threshold}", "a:B")
"""


@pytest.mark.parametrize(
    "words",
    [
        ["--plugin-config", "acme.threshold=0.7"],
        ["no/model", "--plugin-config", "acme.threshold=0.7"],
        ["no/model", "--plugin-config.acme.threshold", "0.7"],
        ["no/model", "--acme-threshold", "0.7"],
        ["no/model", "--config", "FILE"],
    ],
)
def test_every_role_boots_with_the_settings_of_plugins(run, installed, tmp_path, words):
    installed("p-acme", SETTINGS, {"vllm.general_plugins": {"acme": "p_acme:register"}})
    (tmp_path / "FILE").write_text("plugin_config: {acme: {threshold: 0.7}}")
    words = [str(tmp_path / "FILE") if word == "FILE" else word for word in words]
    status, out, _ = run("why", "models", "Net0.7", "--json", *words)
    assert status == 0
    registered = [event["role"] for event in json.loads(out)["events"] if event["kind"] == "register"]
    assert sorted(registered) == ["engine_core", "front_end", "inspector", "worker"]


def test_doctor_explains_a_wrong_setting_and_one_for_nobody(run, installed):
    installed("p-acme", SETTINGS, {"vllm.general_plugins": {"acme": "p_acme:register"}})
    status, out, _ = run("doctor", "--plugin-config", "acme.treshold=1")
    assert status == 1
    line = finding(out, "treshold")
    assert "ERROR: plugin 'acme': the setting acme.treshold is not known; did you mean 'threshold'?" in line
    assert "(front_end, engine_core, worker, inspector)" in line
    status, out, _ = run("doctor", "--plugin-config", "acne.threshold=1")
    assert status == 1
    assert "did you mean 'acme'?" in finding(out, "'acne'")


PATCHES_SCHEDULER = """
def register():
    from vllm.v1.core.sched.scheduler import Scheduler
    before = Scheduler.schedule
    Scheduler.schedule = lambda self, *args, **kwargs: before(self, *args, **kwargs)
"""


def test_doctor_tells_of_two_plugins_that_patch_one_place(run, installed):
    installed("p-one", PATCHES_SCHEDULER, {"vllm.general_plugins": {"one": "p_one:register"}})
    _, out, _ = run("doctor")
    assert "is patched" not in out, "one patch is no fault"
    installed("p-two", PATCHES_SCHEDULER, {"vllm.general_plugins": {"two": "p_two:register"}})
    status, out, _ = run("doctor")
    assert status == 1
    line = finding(out, "is patched by two plugins")
    assert "Scheduler.schedule is patched by two plugins: first by p-one 1.0" in line
    assert "then by p-two 1.0" in line
    assert "leave one of the two out" in line
    status, out, _ = run("why", "patches", "hardpoint.engine_core.scheduler.default.Scheduler.schedule")
    assert (status, out.count("override")) == (0, 8)


@pytest.mark.parametrize("there", [True, False])
def test_new_says_how_to_test_where_pytest_is_and_where_it_is_not(run, tmp_path, monkeypatch, there):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real(name) if there or name != "pytest" else None)
    status, out, _ = run("new", "general", "my-plugin", "--path", str(tmp_path / "my-plugin"))
    assert (status, "pip install pytest && cd" in out) == (0, not there)
