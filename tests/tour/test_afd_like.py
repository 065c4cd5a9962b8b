"""examples/plugins/afd_like, installed with pip into a fresh environment: a plugin that patches a config check."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from server_process import ServerProcess

pytestmark = pytest.mark.server

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "afd_like"
WORKER = "afd_like.worker.AfdLikeWorker"
BUILT_IN_WORKER = "hardpoint.worker.device_worker.Worker"
SETTINGS = json.dumps({"afd_like": {"role": "ffn", "peers": 2}})
OVERRIDES = json.dumps({"architectures": ["AfdLikeLlamaForCausalLM"]})
EVERYWHERE = ["front_end", "engine_core", "worker"]


@pytest.fixture(scope="module")
def environment(make_environment):
    made = make_environment()
    before = sorted(EXAMPLE.rglob("*"))
    made.install(EXAMPLE)
    assert sorted(EXAMPLE.rglob("*")) == before, "the installation wrote into the example"
    return made


@pytest.fixture(scope="module")
def server(environment, tiny_llama):
    """Three processes: the worker is one of its own."""
    flags = ["--additional-config", SETTINGS, "--hf-overrides", OVERRIDES, "--distributed-executor-backend", "mp"]
    variables = {**environment.variables, "VLLM_SERVER_DEV_MODE": "1"}
    with ServerProcess(tiny_llama, *flags, program=[str(environment.bin / "vllm")], env=variables) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def ledger(server):
    return server.ledger()


def test_its_worker_runs_the_model_it_registered(server):
    before = server.http.post("/collective_rpc", json={"method": "afd_state"}).json()["results"][0]
    assert server.complete(max_tokens=4, ignore_eos=True).json()["usage"]["completion_tokens"] == 4
    [state] = server.http.post("/collective_rpc", json={"method": "afd_state"}).json()["results"]
    assert state == {"role": "ffn", "peers": 2, "steps": before["steps"] + 4}
    assert "afd_like: worker 0 is ready for ffn with 2 peers" in server.log()


def test_the_ledger_shows_its_one_write_and_that_it_ran_in_every_process(ledger):
    its = [entry for entry in ledger if entry["origin"] and entry["origin"]["distribution"] == "afd-like"]
    writes = [(e["role"], e["name"], e["detail"]) for e in its if e["kind"] == "config_write"]
    assert writes == [("front_end", "parallel_config.worker_cls", f"'auto' -> '{WORKER}' before the steps")]
    assert [e["role"] for e in its if (e["kind"], e["key"]) == ("call", "general")] == EVERYWHERE
    assert [e["role"] for e in its if (e["kind"], e["key"]) == ("register", "models")] == EVERYWHERE
    patches = [(e["role"], e["name"], e["detail"].rpartition(" is now ")[2]) for e in its if e["key"] == "patches"]
    where, what = "hardpoint.config.sections.vllm.VllmConfig.__post_init__", "afd_like.patches.patch_config_check"
    assert patches == [(role, where, f"{what}.<locals>.checked") for role in EVERYWHERE]
    assert {e["kind"] for e in its} - {"inspect"} == {
        "discover", "load", "call", "register", "config_write", "override",
    }  # fmt: skip


def run(environment, model, source: str, **variables: str) -> list[str]:
    return environment.run("python", "-c", source, str(model), **variables).stdout.splitlines()


CONFIGURE = """
import json, sys
from vllm import EngineArgs
def worker(**more):
    return EngineArgs(model=sys.argv[1], **more).create_engine_config().parallel_config.worker_cls
key = {"afd_like": {"role": "attention"}}
"""


def test_it_takes_the_worker_only_where_it_is_asked_and_nobody_else_chose(environment, tiny_llama):
    source = CONFIGURE + (
        "print(worker(additional_config=key))\n"
        "print(worker())\n"
        "print(worker(additional_config=key, worker_cls='vllm.v1.worker.gpu_worker.Worker'))\n"
    )
    assert run(environment, tiny_llama, source)[-3:] == [WORKER, BUILT_IN_WORKER, "vllm.v1.worker.gpu_worker.Worker"]


def test_being_called_again_changes_nothing(environment, tiny_llama):
    source = CONFIGURE + (
        "import afd_like\n"
        "from vllm.config import VllmConfig\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "check = VllmConfig.__post_init__\n"
        "load_general_plugins()\n"
        "afd_like.register()\n"
        "print(VllmConfig.__post_init__ is check, check.afd_like)\n"
        "print(worker(additional_config=key))\n"
    )
    assert run(environment, tiny_llama, source)[-2:] == ["True True", WORKER]


def test_why_names_the_plugin_as_author_of_the_field(environment, tiny_llama):
    flags = [str(tiny_llama), "--additional-config", SETTINGS]
    said = environment.run("vllm", "plugins", "why", "config", "parallel_config.worker_cls", *flags).stdout
    assert f"'auto' -> '{WORKER}' before the steps [afd-like 0.1.0, vllm.general_plugins: afd_like]" in said


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"role": "both"}, "additional_config.afd_like.role is 'both': expected one of attention, ffn"),
        ({"rolle": "ffn"}, "additional_config.afd_like has no key rolle"),
    ],
)
def test_what_is_wrong_with_its_key_stops_the_start_in_its_name(environment, tiny_llama, given, complaint):
    command = [environment.bin / "vllm", "serve", tiny_llama, "--port", "0"]
    done = subprocess.run(
        [*command, "--additional-config", json.dumps({"afd_like": given})],
        env=environment.variables, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "from: afd-like 0.1.0, vllm.general_plugins: afd_like" in done.stderr
    assert "HARDPOINT_PLUGINS_DENY=afd_like" in done.stderr
