"""The example plugins: what `plugins new` makes of each passes its own tests, and all of them run in one server."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hardpoint.cli.plugins_new import examples, keys, new_plugin
from hardpoint.testing import RunningServer, project_plugin, tiny_model

KEYS = keys()
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_pytest(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *words]
    environment = {**os.environ, **VARIABLES, **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280)


def test_what_is_made_of_every_example_passes_its_tests(tmp_path):
    folders = [new_plugin(key, f"my-{key.replace('_', '-')}", tmp_path / key) for key in KEYS]
    # In one process, which spares the time to import torch for each.
    shared = ["-p", "hardpoint.testing.pytest_plugin", "-c", os.devnull, "--rootdir", str(tmp_path)]
    path = os.pathsep.join(str(folder) for folder in folders)
    done = run_pytest(*shared, "-v", *(str(folder / "tests") for folder in folders), cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout[-8000:]
    for key in KEYS:
        assert f"test_my_{key}.py" in done.stdout


@pytest.mark.parametrize("key", ["general", "worker_cls"])
def test_a_package_is_tested_the_way_its_readme_says(tmp_path, key):
    folder = new_plugin(key, "my-plugin", tmp_path / "new")
    done = run_pytest(cwd=folder, PYTHONPATH="")
    assert done.returncode == 0, done.stdout[-8000:]
    assert " passed" in done.stdout


# What each example needs on the command line to be chosen.
FLAGS = [
    "--attention-backend", "ACME_ATTN",
    "--quantization", "acme_int8",
    "--scheduler-cls", "acme_scheduler_cls.AcmeScheduler",
    "--worker-cls", "acme_worker_cls.AcmeWorker",
    "--worker-extension-cls", "acme_worker_extension_cls.AcmeExtension",
    "--distributed-executor-backend", "acme_executor_class.AcmeExecutor",
    "--tool-call-parser", "acme", "--enable-auto-tool-choice",
    "--reasoning-parser", "acme",
    "--hf-overrides", '{"architectures": ["AcmeForCausalLM"]}',
    "--additional-config", '{"acme": {"ban": [5]}}',
    "--plugin-config", "acme.greeting=bonjour",
    "--acme-times", "2",
    "--served-model-name", "m",
]  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    plugins = [project_plugin(examples() / key, tmp_path_factory.mktemp("meta")) for key in KEYS]
    # The others are found by their flags.
    names = ",".join(f"acme_{key}" for key in KEYS if not key.endswith(("_cls", "_class", "_overrides", "_plugin")))
    variables = {"VLLM_PLUGINS": names, "ACME_PLATFORM": "1", "VLLM_LOG_STATS_INTERVAL": "0.2"}
    with RunningServer(tiny_model(), FLAGS, plugins, variables) as server:
        yield server


def test_all_examples_run_in_one_server(served):
    assert served.get("/v1/acme/hello") == (200, {"plugin": "acme", "model": "m"})
    refused = served.post("/v1/completions", {"prompt": [1, 2, 3], "return_token_ids": True})
    assert (refused.status, "AcmeRequestHook" in str(refused.body)) == (400, True)
    answer = served.complete([1, 2, 3], 4, vllm_xargs={"acme_only": [7, 5]})
    sevens = served.post("/detokenize", {"tokens": [7] * 4}).body["prompt"]
    assert answer["choices"][0]["text"] == sevens
    overrides = {entry["name"]: entry["detail"] for entry in served.ledger(key="platforms", kind="override")}
    assert overrides == {"acme_platforms": "platform acme_platforms.platform.AcmePlatform"}
    log = served.log()
    said = {line.partition("[")[2].split()[0] for line in log.splitlines() if "acme says: bonjour bonjour" in line}
    assert said >= {"front", "engine"}, "an inspector starts only where its cache does not know the model class"
    assert "matches no plugin" not in log
    assert "blocks of 32 tokens" in log
    registered = {(entry["key"], entry["name"]) for entry in served.ledger(kind="register")}
    assert {
        ("models", "AcmeForCausalLM"),
        ("oot_ops", "RMSNorm"),
        ("pluggable_layers", "RowParallelLinear"),
        ("quantization_methods", "acme_int8"),
        ("model_loaders", "acme_npz"),
        ("structured_output_backends", "acme_choice"),
        ("plugin_config", "acme"),
        ("tool_parsers", "acme"),
        ("reasoning_parsers", "acme"),
        ("lora_resolvers", "acme"),
    } <= registered
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 0,
        "tools": [{"function": {"name": "f"}}],
    }
    (choice,) = served.post("/v1/chat/completions", body).body["choices"]
    assert choice["message"]["reasoning"], "without its mark all of an answer is reasoning"
    faults = [entry["detail"] for entry in served.ledger(kind="fault")]
    assert faults == []


def test_settings_are_shown_without_their_values(served):
    (settings,) = served.get("/plugins").body["settings"]
    assert settings["name"] == "acme"
    assert settings["settings"] == {"greeting": "text", "times": "a whole number"}
    written = [e["name"] for e in served.ledger(key="config") if "plugins_config" in e["name"]]
    assert "plugins_config.settings.acme.greeting" in written
    assert "bonjour" not in str(served.ledger())


def test_the_metrics_count_what_plugins_did(served):
    text = served.get("/metrics").body
    assert 'hardpoint:plugin_loads_total{key="endpoints",name="acme_endpoints",role="front_end"} 1.0' in text
    assert 'hardpoint:plugin_call_seconds{key="general",name="acme_general",role="engine_core' in text


def test_every_example_says_what_it_is():
    for key in KEYS:
        project = tomllib.loads((examples() / key / "pyproject.toml").read_text())["project"]
        readme = (examples() / key / "README.md").read_text()
        assert project["description"] in readme
        assert readme.startswith(f"# acme-{key.replace('_', '-')}\n")
