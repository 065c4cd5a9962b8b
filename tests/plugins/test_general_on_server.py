"""General plugins on real starts: in every process and in time (bug B01), and when one of them is broken (bug B04)."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from hardpoint.testing import make_plugin, plugin_environment
from server_process import ServerProcess

pytestmark = pytest.mark.server

MARK = """
import json, os, time
from hardpoint.extensions.ledger import ledger

def register():
    line = [ledger.role, os.getpid(), os.getppid(), time.time()]
    with open(os.environ["MARK_FILE"], "a") as file:
        print(json.dumps(line), file=file, flush=True)
    from vllm import ModelRegistry
    ModelRegistry.register_model("ToyLlamaForCausalLM", "mark_model:ToyLlamaForCausalLM")
"""
MODEL = """
from vllm.model_executor.models.llama import LlamaForCausalLM
class ToyLlamaForCausalLM(LlamaForCausalLM): pass
"""
TOY = ["--hf-overrides", json.dumps({"architectures": ["ToyLlamaForCausalLM"]})]
PROMPT = "A server answers"


@pytest.fixture(scope="module")
def p_mark(tmp_path_factory):
    files = {"mark.py": MARK, "mark_model.py": MODEL}
    return make_plugin(
        tmp_path_factory.mktemp("mark"), "p-mark", files, {"vllm.general_plugins": {"mark": "mark:register"}}
    )


@pytest.fixture(scope="module")
def plain(tiny_llama):
    """What the plain model answers, without any plugin."""
    with ServerProcess(tiny_llama, env={"VLLM_PLUGINS": ""}) as server:
        server.wait_ready()
        yield server.complete(PROMPT, ignore_eos=True).json()["choices"][0]["text"]


def marks(file) -> list[list]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ([], ["front_end", "engine_core"]),
        (["--distributed-executor-backend", "mp"], ["front_end", "engine_core", "worker"]),
    ],
)
def test_every_process_that_reads_a_registry_is_marked_once(p_mark, plain, tiny_llama, tmp_path, flags, roles):
    variables = {"PYTHONPATH": p_mark.environment()["PYTHONPATH"], "MARK_FILE": str(tmp_path / "marks")}
    with ServerProcess(tiny_llama, *TOY, *flags, env=variables) as server:
        server.wait_ready()
        assert server.complete(PROMPT, ignore_eos=True).json()["choices"][0]["text"] == plain
        found = marks(tmp_path / "marks")
        assert [role for role, *_ in found if role != "inspector"] == roles
        pids = [pid for role, pid, *_ in found if role != "inspector"]
        assert pids[0] == server.process.pid
        assert len(set(pids)) == len(roles)


def script(source: str, environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        env={**environment, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


EMBEDDED = """
import sys
from hardpoint import LLM, EngineArgs, SamplingParams
from hardpoint.extensions.registry import registry
assert "ToyLlamaForCausalLM" not in registry("models").names()
overrides = {"architectures": ["ToyLlamaForCausalLM"]}
args = EngineArgs(model=sys.argv[1], hf_overrides=overrides)
architecture = args.create_model_config().architecture
llm = LLM(sys.argv[1], hf_overrides=overrides)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
print(architecture)
print(repr(llm.generate(sys.argv[2], params)[0].outputs[0].text))
"""


def test_an_embedder_may_ask_for_the_model_config_first(p_mark, plain, tiny_llama, tmp_path):
    done = script(EMBEDDED, p_mark.environment(MARK_FILE=str(tmp_path / "marks")), tiny_llama, PROMPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["ToyLlamaForCausalLM", repr(plain)]
    assert [role for role, *_ in marks(tmp_path / "marks") if role != "inspector"] == ["front_end", "engine_core"]


IN_THE_SCRIPT = """
import sys
from hardpoint import LLM, SamplingParams
from hardpoint.worker.models.registry import ModelRegistry
ModelRegistry.register_model("ToyLlamaForCausalLM", "mark_model:ToyLlamaForCausalLM")
try:
    llm = LLM(sys.argv[1], hf_overrides={"architectures": ["ToyLlamaForCausalLM"]})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print(repr(llm.generate(sys.argv[2], params)[0].outputs[0].text))
except Exception as error:
    print("ToyLlamaForCausalLM:", error)
"""


def test_what_a_script_registers_in_its_own_process_works_or_is_missed_with_the_fix(p_mark, plain, tiny_llama):
    environment = p_mark.environment(VLLM_PLUGINS="", MARK_FILE="/dev/null")
    done = script(IN_THE_SCRIPT, environment, tiny_llama, PROMPT)
    last = done.stdout.splitlines()[-1]
    assert last == repr(plain) or "ModelRegistry.register_model in a general plugin" in last, done.stdout + done.stderr


# -- one of three is broken -------------------------------------------------------------------------------------------

GOOD = "def register(): pass\n"
ONLY_IN_THE_ENGINE = """
from hardpoint.extensions.ledger import ledger
def register():
    if ledger.role == "engine_core":
        {}
"""
HALF = """
from vllm import ModelRegistry
def register():
    ModelRegistry.register_model("Half", "half:Model")
    raise ValueError("boom")
"""
BROKEN = {
    "raises half-way": (HALF, "ValueError: boom", "front_end"),
    "raises in the engine": (ONLY_IN_THE_ENGINE.format('raise ValueError("boom")'), "ValueError: boom", "engine_core"),
    "exits in the engine": (ONLY_IN_THE_ENGINE.format("raise SystemExit(3)"), "it called sys.exit(3)", "engine_core"),
}


def three(folder, bad: str):
    sources = {"a_ok": GOOD, "b_bad": bad, "c_ok": GOOD}
    return [
        make_plugin(folder / name, name.replace("_", "-"), source, {"vllm.general_plugins": {name: f"{name}:register"}})
        for name, source in sources.items()
    ]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_function_that_fails_ends_the_start_in_seconds_and_names_the_plugin(tmp_path, tiny_llama, kind):
    source, reason, role = BROKEN[kind]
    variables = {"PYTHONPATH": plugin_environment(three(tmp_path, source))["PYTHONPATH"]}
    with ServerProcess(tiny_llama, env=variables) as server:
        assert server.exit_status() == 1
        log = server.log()
        assert f"hardpoint: error: plugin 'b_bad' failed: {reason}; its registrations are undone" in log
        assert f"from: b-bad 1.0, vllm.general_plugins: b_bad, in {role}" in log
        assert "fix: mend or uninstall b-bad 1.0, or leave it out with HARDPOINT_PLUGINS_DENY=b_bad" in log
        assert "Traceback" not in log
        server.assert_nothing_left()


def test_the_allowlist_starts_a_server_without_it(tmp_path, tiny_llama):
    variables = {"PYTHONPATH": plugin_environment(three(tmp_path, HALF))["PYTHONPATH"], "VLLM_PLUGINS": "a_ok,c_ok"}
    with ServerProcess(tiny_llama, env=variables) as server:
        server.wait_ready()
        assert server.complete().status_code == 200
        ledger = server.ledger()
        assert {e["name"] for e in ledger if (e["kind"], e["key"]) == ("call", "general")} == {"a_ok", "c_ok"}
        assert [e for e in ledger if e["name"] == "Half"] == []


def run(plugins, *words: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words],
        env=plugin_environment(plugins), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    return time.monotonic() - started, done


SLEEPS = "import time\ndef register(): time.sleep(60)\n"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["plugins", "list"]])
def test_one_that_sleeps_does_not_hold_up_what_loads_no_plugin(tmp_path, words):
    seconds, done = run(three(tmp_path, SLEEPS), "-m", "hardpoint", *words)
    assert done.returncode == 0
    assert seconds < 30


def test_the_help_of_serve_waits_for_one_that_sleeps_only_so_long(tmp_path):
    source = "from hardpoint.cli import main, serve; serve._HELP_WAIT_S = 0.5; main.main(['serve', '--help'])"
    seconds, done = run(three(tmp_path, SLEEPS), "-c", source)
    assert done.returncode == 0, done.stderr
    assert "--max-model-len" in done.stdout
    assert "this help lacks what plugins add: the call of plugin 'b_bad' takes longer than 0.5 s" in done.stdout
    assert seconds < 30


def test_a_slow_one_is_told_with_its_seconds(tmp_path):
    slow = "import time\ndef register(): time.sleep(1)\n"
    _, done = run(three(tmp_path, slow), "-m", "hardpoint", "serve", str(tmp_path / "no-model"))
    assert "slow b_bad 1." in done.stdout + done.stderr
