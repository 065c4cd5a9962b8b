"""Platform plugins on real starts: an active one and where its hooks run, and detectors that are wrong (bug B08)."""

from __future__ import annotations

import json

import pytest

from hardpoint.testing import make_plugin
from server_process import ServerProcess

pytestmark = pytest.mark.server

# Whole and out of tree: what a device vendor ships, on the device at hand.
SOURCE = """
import json, os
from hardpoint.extensions.ledger import ledger
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

def mark(what):
    with open(os.environ["MARKS"], "a") as file:
        print(json.dumps([what, ledger.role]), file=file, flush=True)

def detect():
    mark("detect")
    return "toy_platform.ToyPlatform"

class ToyPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "toy"

    @classmethod
    def pre_register_and_update(cls, parser=None):
        mark("pre_register" if parser is None else "pre_register with parser")
        if parser is not None:
            parser.add_argument("--toy-level", type=int, default=1)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config):
        mark("defaults")

    @classmethod
    def check_and_update_config(cls, vllm_config):
        mark("check")
        super().check_and_update_config(vllm_config)
        if vllm_config.parallel_config.worker_cls.startswith("hardpoint."):
            vllm_config.parallel_config.worker_cls = "toy_worker.ToyWorker"
        if "+rms_norm" not in vllm_config.compilation_config.custom_ops:
            vllm_config.compilation_config.custom_ops.append("+rms_norm")

    @classmethod
    def register_triton_kernel_overrides(cls):
        mark("triton")

    @classmethod
    def update_block_size_for_backend(cls, vllm_config):
        mark("block size")
"""
WORKER_SOURCE = """
from toy_platform import mark
from vllm.v1.worker.gpu_worker import Worker

class ToyWorker(Worker):
    def load_model(self, **kwargs):
        mark("worker")
        super().load_model(**kwargs)
"""
FRONT, ENGINE, WORKER = "front_end", "engine_core", "worker"


def install(folder, source: str) -> dict[str, str]:
    points = {"vllm.platform_plugins": {"p_plat": "toy_platform:detect"}}
    plugin = make_plugin(folder, "p-plat", {"toy_platform.py": source, "toy_worker.py": WORKER_SOURCE}, points)
    return {"PYTHONPATH": plugin.environment()["PYTHONPATH"], "MARKS": str(folder / "marks")}


@pytest.fixture(scope="module")
def active(tmp_path_factory, tiny_llama):
    """A server on the toy platform, its worker in a process of its own, and the hooks that ran: [what, role]."""
    folder = tmp_path_factory.mktemp("platform")
    flags = ["--toy-level", "3", "--distributed-executor-backend", "mp"]
    with ServerProcess(tiny_llama, *flags, env=install(folder, SOURCE)) as server:
        server.wait_ready()
        yield server, [json.loads(line) for line in (folder / "marks").read_text().splitlines()]


def test_one_active_plugin_wins_in_every_process(active):
    server, marks = active
    assert [role for what, role in marks if what == "detect"] == [FRONT, ENGINE, WORKER]
    assert len(server.lines("platform plugin 'p_plat' (p-plat 1.0) is activated")) == 3
    assert server.complete().status_code == 200


@pytest.mark.parametrize(
    ("hook", "roles"),
    [
        ("pre_register with parser", [FRONT]),
        ("defaults", [FRONT, ENGINE]),
        ("check", [FRONT, ENGINE]),
        ("triton", [WORKER]),
        ("block size", [WORKER]),
        ("worker", [WORKER]),
    ],
)
def test_hooks_run_where_the_table_says(active, hook, roles):
    assert [role for what, role in active[1] if what == hook] == roles


def test_its_writes_are_its_own_and_the_second_run_finds_them_done(active):
    server, _ = active
    ledger = server.ledger()
    writes = [
        (e["role"], e["name"], e["detail"])
        for e in ledger
        if e["kind"] == "config_write" and e["origin"]["distribution"] == "p-plat"
    ]
    in_step = "in step 'let the platform check'"
    assert writes == [
        (FRONT, "parallel_config.worker_cls",
         f"'hardpoint.worker.device_worker.Worker' -> 'toy_worker.ToyWorker' {in_step}"),
        (FRONT, "compilation_config.custom_ops", f"['all'] -> ['all', '+rms_norm'] {in_step}"),
    ]  # fmt: skip
    assert "a second time" not in server.log()


BROKEN = {
    "no such class": ("def detect(): return 'toy.Gone'\n", "", "gave 'toy.Gone', which cannot be imported"),
    "not a string": ("def detect(): return 7\n", "", "gave int 7, not a class path"),
    "named and raises": (
        "def detect(): import driver_that_is_gone\n",
        "p_plat",
        "its detector failed: ModuleNotFoundError: No module named 'driver_that_is_gone'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_detector_that_is_wrong_stops_the_start_and_is_named(tmp_path, tiny_llama, kind):
    source, named, complaint = BROKEN[kind]
    variables = install(tmp_path, source) | ({"VLLM_PLUGINS": named} if named else {})
    with ServerProcess(tiny_llama, env=variables) as server:
        assert server.exit_status() == 1
        log = server.log()
        assert f"error: platform plugin 'p_plat' {complaint}".replace("'p_plat' its", "'p_plat': its") in log
        assert "from: p-plat 1.0, vllm.platform_plugins: p_plat, in front_end" in log
        assert "Traceback" not in log


def test_a_forced_cpu_asks_no_plugin_and_says_so(tmp_path):
    source, _, _ = BROKEN["not a string"]
    variables = {**install(tmp_path, source), "VLLM_TARGET_DEVICE": "cpu"}
    with ServerProcess(tmp_path / "no-model", env=variables) as server:
        assert server.exit_status() == 1
        log = server.log()
        assert "VLLM_TARGET_DEVICE is cpu, so the installed platform plugins are not asked: p_plat (p-plat 1.0)" in log
        assert "no-model" in log, "the start goes on"
