"""The example platform, installed, on real servers: it serves the default model with parts of its own, and each of its
hooks is called where the table says and as often; with two ranks, these talk through its communicator."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from hardpoint.cli.plugins_new import examples
from hardpoint.extensions.points import PLATFORM_HOOKS
from hardpoint.testing import make_plugin, project_plugin
from server_process import ServerProcess

pytestmark = pytest.mark.server

# Its detector comes before the platform is used and puts a counter around each hook; it is not active itself.
COUNTER = """
import json, os
from functools import wraps
from hardpoint.extensions.ledger import ledger
from acme_platforms.platform import AcmePlatform

def mark(*what):
    with open(os.environ["MARKS"], "a") as file:
        print(json.dumps([*what, ledger.role, os.getpid()]), file=file, flush=True)

def detect():
    for name in json.loads(os.environ["HOOKS"]):
        original = getattr(AcmePlatform, name).__func__
        def counted(cls, *args, _name=name, _original=original, **kwargs):
            with_parser = _name == "pre_register_and_update" and bool(args or kwargs)
            mark(_name + " with the parser" * with_parser)
            return _original(cls, *args, **kwargs)
        setattr(AcmePlatform, name, classmethod(wraps(original)(counted)))
    return None
"""
HOOKS = [row.key for row in PLATFORM_HOOKS]


def start(folder: Path, model: Path, *flags: str) -> ServerProcess:
    counter = make_plugin(folder, "p-counter", COUNTER, {"vllm.platform_plugins": {"counter": "p_counter:detect"}})
    example = project_plugin(examples() / "platforms", folder / "meta")
    paths = [plugin.environment()["PYTHONPATH"] for plugin in (example, counter)]
    env = {
        "PYTHONPATH": os.pathsep.join(paths),
        "ACME_PLATFORM": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "MARKS": str(folder / "marks"),
        "HOOKS": json.dumps(HOOKS),
    }
    return ServerProcess(model, *flags, env=env)


def calls(folder: Path) -> dict[str, Counter[str]]:
    """Hook -> role -> calls in each of the role's processes, which must be equal."""
    found: dict[str, dict[tuple[str, int], int]] = {}
    for line in (folder / "marks").read_text().splitlines():
        what, role, pid = json.loads(line)
        counts = found.setdefault(what, {})
        counts[role, pid] = counts.get((role, pid), 0) + 1
    result: dict[str, Counter[str]] = {}
    for what, counts in found.items():
        for (role, _), count in counts.items():
            known = result.setdefault(what, Counter())
            assert known.get(role, count) == count, f"{what} in {role}: {counts}"
            known[role] = count
    return result


FRONT, ENGINE, WORKER = "front_end", "engine_core", "worker"
# What a worker's process is called that is the engine core's.
BOTH = "engine_core+worker"
EXPECTED = {
    "pre_register_and_update with the parser": {FRONT: 1},
    "pre_register_and_update": {FRONT: 1},
    "validate_environ": {FRONT: 1},
    "apply_config_platform_defaults": {FRONT: 1, ENGINE: 1},
    "check_and_update_config": {FRONT: 1, ENGINE: 1},
}
OF_WORKERS = (
    "import_kernels",
    "register_triton_kernel_overrides",
    "get_attn_backend_cls",
    "update_block_size_for_backend",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, smollm2_gguf):
    folder = tmp_path_factory.mktemp("alone")
    with start(folder, smollm2_gguf, "--max-model-len", "256", "--dtype", "float32") as server:
        server.wait_ready()
        yield server, folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("two")
    with start(folder, tiny_llama, "--tensor-parallel-size", "2") as server:
        server.wait_ready()
        yield server, folder


def devices(server: ServerProcess) -> list[dict]:
    return server.http.post("/collective_rpc", json={"method": "acme_device"}).json()["results"]


def test_it_serves_the_default_model_with_its_own_parts(alone):
    server, _ = alone
    answer = server.complete(prompt="The capital of France is", max_tokens=6, temperature=0).json()
    assert "Paris" in answer["choices"][0]["text"]
    (device,) = devices(server)
    assert device["attention"] == ["AcmeDeviceAttentionImpl"]
    assert device["turned"] >= 6 * 30
    log = server.log()
    assert "platform plugin 'acme_platforms' (acme-platforms 0.1.0) is activated" in log
    # A GiB less an eighth, in blocks of 32 tokens.
    assert f"KV cache: {(7 << 27) // (30 * 2 * 32 * 192 * 4)} blocks of 32 tokens" in log


def test_each_hook_is_called_where_and_as_often_as_the_table_says(alone):
    inside = {hook: {BOTH: 1} for hook in (*OF_WORKERS, "get_kv_cache_config_builder_cls")}
    assert calls(alone[1]) == EXPECTED | inside
    assert "a second time" not in alone[0].log()


def test_two_ranks_say_the_same_through_its_communicator(two_ranks):
    server, _ = two_ranks
    assert server.complete(prompt=[1, 2, 3], max_tokens=3, ignore_eos=True).status_code == 200
    found = devices(server)
    assert [device["communicator"] for device in found] == ["AcmeDeviceCommunicator"] * 2
    assert found[0]["summed"] == found[1]["summed"] > 0


def test_two_ranks_each_call_the_hooks_of_workers(two_ranks):
    of_workers = {hook: {WORKER: 1} for hook in (*OF_WORKERS, "get_device_communicator_cls")}
    found = calls(two_ranks[1])
    assert found == EXPECTED | of_workers | {"get_kv_cache_config_builder_cls": {ENGINE: 1}}
    pids = {json.loads(line)[2] for line in (two_ranks[1] / "marks").read_text().splitlines() if WORKER in line}
    assert len(pids) == 2
