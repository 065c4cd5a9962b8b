"""Plugins in the shapes that plugin authors copy: a device, a stat logger, an admin route and forced tokens at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hardpoint.testing import make_plugin, plugin_environment
from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

# A device of its own that is the processor once more: platform class, attention backend, and a rotary op for it.
PLATFORM = """
def platform():
    return "second_cpu.device.SecondCpuPlatform"

def register_ops():
    import second_cpu.ops
"""
DEVICE = """
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

class SecondCpuPlatform(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "second_cpu"

    @classmethod
    def check_and_update_config(cls, vllm_config):
        super().check_and_update_config(vllm_config)
        vllm_config.compilation_config.custom_ops = ["all"]

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "second_cpu.attention.SecondCpuBackend"
"""
ATTENTION = """
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

class SecondCpuBackend(CPUAttentionBackend):
    @staticmethod
    def get_name():
        return "SECOND_CPU"
"""
OPS = """
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

@RotaryEmbedding.register_oot
class SecondCpuRotary(RotaryEmbedding):
    turned = 0

    def forward_oot(self, positions, query, key=None):
        SecondCpuRotary.turned += 1
        return self.forward_native(positions, query, key)
"""

STAT_LOGGER = """
import json, os
from vllm.v1.metrics.loggers import StatLoggerBase

class LastStep(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.model, self.generated = vllm_config.model_config.model, 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats:
            self.generated += iteration_stats.num_generation_tokens

    def log(self):
        path = os.environ["LAST_STEP"]
        with open(path + ".new", "w") as file:
            json.dump([self.model, self.generated], file)
        os.replace(path + ".new", path)

    def log_engine_initialized(self):
        pass
"""

ADMIN = '''
from fastapi import APIRouter, HTTPException, Request

class Admin:
    name = "admin"
    required_tasks = ("generate",)

    def attach_router(self, app):
        router = APIRouter(prefix="/v1/admin")

        @router.get("/scheduler_config")
        async def scheduler_config(request: Request):
            client = request.app.state.admin_client
            return {"results": await client.collective_rpc("get_scheduler_config")}

        @router.get("/no_such_method")
        async def no_such_method(request: Request):
            try:
                await request.app.state.admin_client.collective_rpc("no_such_method", timeout=5)
            except Exception as error:
                raise HTTPException(501, str(error))

        app.include_router(router)

    async def init_state(self, engine_client, state, args):
        state.admin_client = engine_client

class WorkerPart:
    """What each worker answers."""

    def get_scheduler_config(self):
        config = self.vllm_config.scheduler_config
        return {"rank": self.rank, "max_num_seqs": config.max_num_seqs}

    def get_device_facts(self):
        from vllm.platforms import current_platform
        from second_cpu.ops import SecondCpuRotary
        layers = self.vllm_config.compilation_config.static_forward_context
        backends = sorted({layer.get_attn_backend().get_name() for layer in layers.values()})
        return [current_platform.device_name, backends, SecondCpuRotary.turned]
'''

# The row-keyed interface, as authors write it by hand: a dict of rows kept in step with the batch.
FORCING = """
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

class ForceTarget(LogitsProcessor):
    argument = "target_token"

    @classmethod
    def validate_params(cls, params):
        target = (params.extra_args or {}).get(cls.argument)
        if target is not None and not isinstance(target, int):
            raise VLLMValidationError(f"{cls.argument} is {target!r}, not a token")

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        target = lambda params, prompt_ids, output_ids: (params.extra_args or {}).get(self.argument)
        process_dict_updates(self.targets, batch_update, target)

    def apply(self, logits):
        if self.targets:
            rows, targets = list(self.targets), list(self.targets.values())
            kept = logits[rows, targets].clone()
            logits[rows] = float("-inf")
            logits[rows, targets] = kept
        return logits

class ForceAnother(ForceTarget):
    argument = "another_token"
"""

BY_ENTRY_POINT, BY_CLASS_PATH = "target_token", "another_token"


@pytest.fixture(scope="module")
def last_step(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stats") / "last-step.json"


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory, last_step: Path) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("shapes")
    device = {
        "second_cpu/__init__.py": PLATFORM,
        "second_cpu/device.py": DEVICE,
        "second_cpu/attention.py": ATTENTION,
        "second_cpu/ops.py": OPS,
    }
    points = {
        "vllm.platform_plugins": {"second_cpu": "second_cpu:platform"},
        "vllm.general_plugins": {"second_cpu_ops": "second_cpu:register_ops"},
    }
    stat_loggers = {"vllm.stat_logger_plugins": {"last_step": "last_step:LastStep"}}
    processors = {"vllm.logits_processors": {"target": "forcing:ForceTarget"}}
    plugins = [
        make_plugin(folder / "device", "second-cpu", device, points),
        make_plugin(folder / "stats", "last-step", STAT_LOGGER, stat_loggers),
        make_plugin(folder / "admin", "admin-route", ADMIN, {"vllm.endpoint_plugins": {"admin": "admin_route:Admin"}}),
        make_plugin(folder / "forcing", "forcing", FORCING, processors),
    ]
    variables = {
        "PYTHONPATH": plugin_environment(plugins)["PYTHONPATH"],
        "VLLM_PLUGINS": "second_cpu,second_cpu_ops,last_step,admin",
        "VLLM_LOG_STATS_INTERVAL": "0.2",
        "LAST_STEP": str(last_step),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    flags = ["--logits-processors", "forcing:ForceAnother", "--worker-extension-cls", "admin_route.WorkerPart"]
    with ServerProcess(tiny_llama, *flags, env=variables) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_llama, env={"VLLM_PLUGINS": ""}) as running:
        yield running.wait_ready()


def rpc(server: ServerProcess, method: str) -> list:
    answer = server.http.post("/collective_rpc", json={"method": method})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def test_the_second_device_serves_with_its_own_attention_and_rotary_op(server, plain):
    [[_, _, before]] = rpc(server, "get_device_facts")
    asked = {"prompt": "The quick brown", "max_tokens": 16, "ignore_eos": True}
    assert server.complete(**asked).json()["choices"] == plain.complete(**asked).json()["choices"]
    [[device, backends, turned]] = rpc(server, "get_device_facts")
    assert (device, backends) == ("second_cpu", ["SECOND_CPU"])
    assert turned == before + 2 * 16, "once in each of two layers for the prompt and each later token"


def test_the_stat_logger_counts_what_was_generated(server, last_step, tiny_llama):
    def generated() -> int:
        assert wait_until(last_step.exists)
        model, tokens = json.loads(last_step.read_text())
        assert model == str(tiny_llama)
        return tokens

    before = generated()
    assert server.complete(max_tokens=7, ignore_eos=True).status_code == 200
    assert wait_until(lambda: generated() >= before + 7), generated()


def test_the_admin_route_asks_every_worker(server):
    answer = server.http.get("/v1/admin/scheduler_config")
    assert answer.json() == {"results": [{"rank": 0, "max_num_seqs": 128}]}
    failed = server.http.get("/v1/admin/no_such_method")
    assert failed.status_code == 501
    assert "no_such_method" in failed.text
    assert server.health() == 200


@pytest.mark.parametrize("argument", [BY_ENTRY_POINT, BY_CLASS_PATH])
def test_the_forced_token_is_the_only_one(server, argument):
    answer = forced(server, {argument: 77})
    assert answer.json()["choices"][0]["token_ids"] == [77] * 5
    free = forced(server, {"some_other_argument": 77}).json()["choices"][0]["token_ids"]
    assert 77 not in free


def test_a_forced_token_that_is_none_is_refused(server):
    answer = forced(server, {BY_ENTRY_POINT: "seven"})
    assert answer.status_code == 400
    assert "target_token is 'seven', not a token" in answer.json()["error"]["message"]


def forced(server: ServerProcess, arguments: dict) -> httpx.Response:
    return server.complete(max_tokens=5, ignore_eos=True, return_token_ids=True, vllm_xargs=arguments)


SCHEDULER = """
from vllm.v1.core.sched.scheduler import Scheduler

class Raising(Scheduler):
    def schedule(self):
        if any(request.num_output_tokens >= 200 for request in self.requests.values()):
            raise RuntimeError("no plan today")
        return super().schedule()
"""


@pytest.fixture
def raising(tmp_path, tiny_llama):
    """Start a server whose scheduler raises once a request has 200 tokens."""
    folder = make_plugin(tmp_path, "raising", SCHEDULER).folder

    def start(**variables: str) -> ServerProcess:
        return ServerProcess(
            tiny_llama, "--scheduler-cls", "raising.Raising", env={"PYTHONPATH": str(folder), **variables}
        )

    return start


def test_a_scheduler_that_raises_ends_running_requests_and_the_server(raising):
    with raising() as server:
        server.wait_ready()
        assert server.complete(max_tokens=3).status_code == 200
        *events, last = server.stream(return_token_ids=True)
        # Every token that was made, the last one too.
        assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 200
        assert last["error"]["code"] == 500
        assert server.exit_status() not in (0, None)
        assert "RuntimeError: no plan today" in server.log()
        server.assert_nothing_left()


def test_a_server_that_outlives_its_scheduler_says_so(raising):
    with raising(VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1") as server:
        server.wait_ready()
        assert server.complete(max_tokens=300, ignore_eos=True).status_code == 500
        assert server.health() == 503
        assert server.complete(max_tokens=1).status_code in (500, 503)
        assert server.process.poll() is None
