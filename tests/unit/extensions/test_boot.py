import logging
import subprocess
import sys

import pytest

from hardpoint.errors import PluginError
from hardpoint.extensions import boot as boot_module
from hardpoint.extensions.boot import boot, load_general_plugins
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.registry import registry
from hardpoint.extensions.rows import Role

COUNT = "calls = []\ndef f(): calls.append(1)\n"
HALF = """
from hardpoint.extensions.registry import registry
def f():
    registry("models").register("Half", "a:B")
    raise ValueError("boom")
"""

pytestmark = pytest.mark.usefixtures("platform")


def calls(name="p_one"):
    return len(sys.modules[name].calls)


def test_a_general_plugin_runs_once_per_process(install):
    install("one", COUNT, {"vllm.general_plugins": {"one": "p_one:f"}})
    first = boot(Role.ENGINE_CORE)
    second = boot(Role.WORKER)
    load_general_plugins()
    assert calls() == 1
    assert first.roles == Role.ENGINE_CORE
    assert second.roles == Role.ENGINE_CORE | Role.WORKER
    assert any(name.startswith("one (p-one 1.0, ") for name in first.loaded)
    assert ledger.entries(kind="call", name="one")[0].role == "engine_core"


def test_the_alias_comes_first_and_the_platform_before_the_general_plugins(install, monkeypatch):
    order = []
    monkeypatch.setattr(boot_module, "load_ref", lambda ref: order.append(ref) or list)
    install("one", "import builtins\ndef f(): pass\n", {"vllm.general_plugins": {"one": "p_one:f"}})
    monkeypatch.setattr(boot_module, "load_group", lambda row: order.append(row.key) or [])
    boot(Role.FRONT_END)
    assert order == [boot_module.ALIAS, boot_module._PLATFORM, "general"]


def test_a_failing_plugin_stops_the_process_each_time_and_leaves_nothing(install):
    install("a", COUNT, {"vllm.general_plugins": {"a_ok": "p_a:f"}})
    install("b", HALF, {"vllm.general_plugins": {"b_bad": "p_b:f"}})
    install("c", COUNT, {"vllm.general_plugins": {"c_ok": "p_c:f"}})
    errors = []
    for _ in range(2):
        with pytest.raises(PluginError, match="'b_bad' failed: ValueError: boom") as caught:
            boot(Role.FRONT_END)
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert "p-b 1.0, vllm.general_plugins: b_bad, in front_end" in str(errors[0])
    line = HALF[: HALF.index("raise")].count("\n") + 1
    assert errors[0].origin.endswith(f"p_b.py:{line}")
    assert isinstance(errors[0].__cause__, ValueError)
    assert "Half" not in registry("models")
    assert (calls("p_a"), calls("p_c")) == (1, 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f():\n    import sys\n    sys.exit(3)\n", r"it called sys.exit\(3\)"),
        ("f = None\n", "is NoneType, which cannot be called"),
        ("f = 'text'\n", "is str, which cannot be called"),
        ("async def f(): pass\n", "coroutine function"),
        ("def f(needed): pass\n", "missing 1 required positional argument"),
    ],
)
def test_what_is_no_function_without_arguments_stops(install, source, said):
    install("one", source, {"vllm.general_plugins": {"bad": "p_one:f"}})
    with pytest.raises(PluginError, match=said):
        boot(Role.WORKER)


def test_a_class_is_called_like_a_function(install):
    install(
        "one",
        "made = []\nclass f:\n    def __init__(self): made.append(1)\n",
        {"vllm.general_plugins": {"x": "p_one:f"}},
    )
    boot(Role.WORKER)
    assert sys.modules["p_one"].made == [1]


def test_an_interrupted_boot_can_be_tried_again(install):
    source = "tries = []\ndef f():\n    tries.append(1)\n    if len(tries) == 1: raise KeyboardInterrupt\n"
    install("one", source, {"vllm.general_plugins": {"x": "p_one:f"}})
    with pytest.raises(KeyboardInterrupt):
        boot(Role.WORKER)
    boot(Role.WORKER)
    assert len(sys.modules["p_one"].tries) == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, {"a", "b"}), ("", set()), ("a", {"a"}), ("a,b", {"a", "b"}), ("a, b", {"a"}), ("b,", {"b"})],
)
def test_the_allowlist_decides_what_runs(install, monkeypatch, names, expected):
    for name in ("a", "b"):
        install(name, COUNT, {"vllm.general_plugins": {name: f"p_{name}:f"}})
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    boot(Role.ENGINE_CORE)
    assert {entry.name for entry in ledger.entries(kind="call") if entry.name in ("a", "b")} == expected
    resolvers = {entry.name for entry in ledger.entries(kind="call") if entry.name.startswith("lora_")}
    assert len(resolvers) == (2 if names is None else 0), "the built-in resolvers are filtered like the rest"


def test_one_line_tells_what_was_loaded_left_out_and_failed(install, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    install("a", COUNT, {"vllm.general_plugins": {"a": "p_a:f"}}, version="1.5")
    install("b", "1/0", {"vllm.general_plugins": {"b": "p_b:f"}})
    install("c", COUNT, {"vllm.general_plugins": {"c": "p_c:f"}})
    monkeypatch.setenv("VLLM_PLUGINS", "a,b")
    boot(Role.WORKER)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO and "plugins of" in r.getMessage()]
    assert line.startswith("plugins of worker (")
    assert "loaded a (p-a 1.5, " in line
    assert "c (not named in VLLM_PLUGINS)" in line
    assert "failed b" in line
    assert "VLLM_PLUGINS names 'a', 'b'" in line


def test_a_replaced_built_in_is_in_the_line(install, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    source = "def f():\n    from hardpoint.extensions.registry import registry\n"
    source += "    registry('models').register('LlamaForCausalLM', 'a:B')\n"
    install("a", source, {"vllm.general_plugins": {"a": "p_a:f"}})
    boot(Role.WORKER)
    assert "replaced models LlamaForCausalLM (a:B replaces hardpoint.worker.models.llama" in caplog.text


def test_without_plugins_nothing_is_said_at_info(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "hardpoint")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "p-" not in p])
    boot(Role.WORKER)
    assert [r for r in caplog.records if r.levelno >= logging.INFO] == []


def test_a_misspelt_name_is_told_once(install, monkeypatch, caplog):
    install("a", COUNT, {"vllm.general_plugins": {"toy_register": "p_a:f"}})
    monkeypatch.setenv("VLLM_PLUGINS", "toy_registre")
    boot(Role.WORKER)
    boot(Role.WORKER)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "did you mean 'toy_register'?" in warning


def test_the_strict_policy_runs_everything_and_lists_every_problem(install, monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "strict")
    monkeypatch.setenv("VLLM_PLUGINS", "a,b,c,d,typo")
    install("a", "import not_there", {"vllm.general_plugins": {"a": "p_a:f"}})
    install("b", HALF, {"vllm.general_plugins": {"b": "p_b:f"}})
    install("c", COUNT, {"vllm.general_plugins": {"c": "p_c:f"}})
    install("d", COUNT, {"vllm.general_plugins": {"c": "p_d:f"}})
    with pytest.raises(PluginError) as caught:
        boot(Role.FRONT_END)
    text = str(caught.value)
    assert "5 plugin problems" in text
    for part in ("not_there", "boom", "from p-c 1.0 and from p-d 1.0", "names 'typo'", "names 'd'"):
        assert part in text


def test_the_strict_policy_lets_a_healthy_start_pass(install, monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "strict")
    install("c", COUNT, {"vllm.general_plugins": {"c": "p_c:f"}})
    boot(Role.FRONT_END)
    assert calls("p_c") == 1


FORK = """
import os
from hardpoint.extensions.boot import boot
from hardpoint.extensions.registry import registry
from hardpoint.extensions.rows import Role
import p_one
boot(Role.FRONT_END)
if os.fork() == 0:
    boot(Role.ENGINE_CORE)
    print("child", len(p_one.calls), registry("kv_connectors").names(), flush=True)
    os._exit(0)
os.wait()
print("parent", len(p_one.calls))
"""


def test_a_forked_child_boots_again(install):
    source = "calls = []\ndef f():\n    from hardpoint.extensions.registry import registry\n"
    source += "    calls.append(1)\n    registry('kv_connectors').register('Mine', 'a:B')\n"
    plugin = install("one", source, {"vllm.general_plugins": {"one": "p_one:f"}})
    environment = plugin.environment(VLLM_LOGGING_LEVEL="ERROR")
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["child 2 ['Mine']", "parent 1"]
