"""Settings of one plugin with parts in every process, given to a script and to a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint.testing import RunningServer, make_plugin, tiny_model

SOURCE = """
from dataclasses import dataclass
from hardpoint.contracts.logits_processor import LogitsProcessorV2
from hardpoint.contracts.stat_logger import StatLoggerBase
from hardpoint.extensions.plugin_config import declare, get_plugin_config

@declare("acme")
@dataclass
class Settings:
    depth: int = 0
    label: str = ""

def say(part):
    print(f"<{part}: {get_plugin_config('acme', Settings)}>", flush=True)

def register(): say("general")

class Log(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        say("stat logger")
        print("<config:", vllm_config.plugins_config.settings, ">", flush=True)
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): pass
    def log_engine_initialized(self): pass

class Processor(LogitsProcessorV2):
    def __init__(self, vllm_config, req_states): say("logits processor")
    def apply(self, logits, ctx): return logits

class Route:
    name, required_tasks = "acme_route", None
    def attach_router(self, app): say("endpoint")
    async def init_state(self, engine_client, state, args): pass
"""
POINTS = {
    "vllm.general_plugins": {"acme": "acme:register"},
    "vllm.stat_logger_plugins": {"acme_log": "acme:Log"},
    "vllm.logits_processors": {"acme_processor": "acme:Processor"},
    "vllm.endpoint_plugins": {"acme_route": "acme:Route"},
}
SCRIPT = """
from hardpoint import LLM
LLM({model!r}, plugin_config={{"acme": {{"depth": 3, "label": "7"}}}}, max_model_len=64, kv_cache_memory_bytes=1 << 24)
"""
EXPECTED = "Settings(depth=3, label='7')"


@pytest.fixture
def plugin(tmp_path):
    return make_plugin(tmp_path, "acme", SOURCE, POINTS)


def test_a_script_gives_settings_to_every_part(plugin):
    environment = plugin.environment(OMP_NUM_THREADS="1", VLLM_TARGET_DEVICE="cpu")
    command = [sys.executable, "-c", SCRIPT.format(model=str(tiny_model()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"<general: {EXPECTED}>") == 2, "in the script and in the engine core"
    assert done.stdout.count(f"<stat logger: {EXPECTED}>") == 1
    assert done.stdout.count(f"<logits processor: {EXPECTED}>") == 1
    assert "<config: {'acme': {'depth': 3, 'label': '7'}} >" in done.stdout


def test_a_server_gives_them_too_also_to_workers_of_their_own(plugin):
    flags = ["--plugin-config", "acme.depth=3", "--plugin-config", "acme.label=7", "--max-model-len", "64"]
    flags += ["--plugin-config", "acme_processor.x=1", "--distributed-executor-backend", "mp"]
    variables = {"VLLM_PLUGINS": "acme,acme_log,acme_route", "VLLM_TARGET_DEVICE": "cpu"}
    with RunningServer(tiny_model(), flags, [plugin], variables) as server:
        log = server.log()
        warned = server.ledger(kind="warn", key="plugin_config")
    assert log.count(f"<general: {EXPECTED}>") == 3, "in the front end, the engine core and the worker"
    for part in ("stat logger", "logits processor", "endpoint"):
        assert log.count(f"<{part}: {EXPECTED}>") == 1
    (entry,) = warned
    assert entry["name"] == "acme_processor"
    assert "acme 1.0 has its settings under 'acme'" in entry["detail"]
