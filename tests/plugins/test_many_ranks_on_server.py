"""Real servers with several ranks, replicas and API servers: how often plugins run and where (the table of counts),
ops and worker methods in every rank, and how all ends with the first that dies (bugs B01, B11, B25, B42)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess, free_port

pytestmark = pytest.mark.server

LAYERS = 2  # of the model
PER_STEP = 2 * LAYERS + 1

REGISTER = """
import json, os, time
from hardpoint.extensions.ledger import ledger

def register():
    line = [ledger.role, os.getpid(), os.getppid(), time.time()]
    with open(os.environ["MARK_FILE"], "a") as file:
        print(json.dumps(line), file=file, flush=True)
    from vllm import ModelRegistry
    import ranks_parts
    ModelRegistry.register_model("ToyLlamaForCausalLM", "ranks_model:ToyLlamaForCausalLM")
"""
MODEL = """
from vllm.model_executor.models.llama import LlamaForCausalLM
class ToyLlamaForCausalLM(LlamaForCausalLM): pass
"""
PARTS = """
import os, time
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.v1.metrics.loggers import StatLoggerBase

CALLS = {"count": 0}

@RMSNorm.register_oot(name="RMSNorm")
class CountingRMSNorm(RMSNorm):
    factor = 1

    def forward_cpu(self, x, residual=None):
        CALLS["count"] += 1
        found = super().forward_native(x, residual)
        return found * self.factor if residual is None else (found[0] * self.factor, found[1])

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"odd {one} {two}")

class Extension:
    def ok(self):
        return [self.rank, os.getpid()]

    def boom(self):
        if self.rank == 1:
            raise Odd("one", "two")

    def slow(self):
        if self.rank == 1:
            time.sleep(60)

    def drag(self):
        run = self.execute_model

        def slower(*args, **kwargs):
            time.sleep(0.01)
            return run(*args, **kwargs)

        self.execute_model = slower

    def weird(self):
        return lambda: 1

    def take_calls(self):
        count, CALLS["count"] = CALLS["count"], 0
        return count

    def scale(self, factor):
        CountingRMSNorm.factor = factor

class Counting(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.engine_index, self.tokens = engine_index, 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            with open(os.environ["STATS_FILE"], "a") as file:
                print(os.getpid(), engine_idx, iteration_stats.num_generation_tokens, file=file, flush=True)

    def log_engine_initialized(self): pass
"""
TOY = ["--hf-overrides", json.dumps({"architectures": ["ToyLlamaForCausalLM"]})]
EXTENDED = ["--worker-extension-cls", "ranks_parts.Extension"]
PROMPT = "A server answers"


@pytest.fixture(scope="module")
def model(make_tiny_llama):
    return make_tiny_llama(num_attention_heads=4, num_key_value_heads=4)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With the plugin, and a cache in which no model class was looked at yet."""
    folder = tmp_path_factory.mktemp("ranks")
    files = {"ranks.py": REGISTER, "ranks_model.py": MODEL, "ranks_parts.py": PARTS}
    points = {
        "vllm.general_plugins": {"mark": "ranks:register"},
        "vllm.stat_logger_plugins": {"counting": "ranks_parts:Counting"},
    }
    plugin = make_plugin(folder / "plugin", "p-ranks", files, points)
    return {
        "PYTHONPATH": plugin.environment()["PYTHONPATH"],
        "HARDPOINT_CACHE": str(folder / "cache"),
        "VLLM_SERVER_DEV_MODE": "1",
    }


class Started(ServerProcess):
    """A server with the plugin, ready; `marks` are the runs of its function, in order."""

    def __init__(self, model: Path, environment: dict[str, str], folder: Path, *flags: str, port: int | None = None):
        self.folder = folder
        files = {"MARK_FILE": str(folder / "marks"), "STATS_FILE": str(folder / "stats")}
        super().__init__(model, *TOY, *flags, port=port, env={**environment, **files})
        self.wait_ready()

    @property
    def marks(self) -> list[list]:
        return [json.loads(line) for line in (self.folder / "marks").read_text().splitlines()]

    @property
    def roles(self) -> Counter:
        return Counter(role for role, *_ in self.marks)

    @property
    def stayed(self) -> Counter:
        """The same without the inspector, which runs where no test before looked at the model class."""
        return Counter({role: count for role, count in self.roles.items() if role != "inspector"})

    def call(self, method: str, **more: object) -> httpx.Response:
        return self.http.post("/collective_rpc", json={"method": method, **more})

    def text(self, **more: object) -> str:
        return self.complete(PROMPT, ignore_eos=True, **more).json()["choices"][0]["text"]

    def shown(self) -> Counter:
        """The roles of the processes that /plugins knows; an engine core may hold its worker."""
        processes = self.http.get("/plugins").json()["processes"]
        roles = [entry["role"].removesuffix("+worker") for entry in processes]
        return Counter(role for role in roles if role != "inspector")


# -- TP 2, and no model class in the cache -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(model, environment, tmp_path_factory):
    with Started(model, environment, tmp_path_factory.mktemp("two"), "-tp", "2", *EXTENDED) as server:
        yield server


@pytest.fixture(scope="module")
def plain(model):
    """What the model says on one rank without plugins, from a script."""
    from hardpoint import LLM, SamplingParams

    llm = LLM(str(model), max_model_len=128, kv_cache_memory_bytes=32 << 20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text


def test_two_ranks_are_four_runs_and_one_in_the_inspector(two):
    assert two.roles == {"front_end": 1, "engine_core": 1, "worker": 2, "inspector": 1}
    order = [role for role, *_ in two.marks]
    assert order[0] == "front_end"
    assert order[-2:] == ["worker", "worker"]
    pids = {role: pid for role, pid, *_ in two.marks}
    assert pids["front_end"] == two.process.pid
    assert {parent for role, _, parent, _ in two.marks if role == "worker"} == {pids["engine_core"]}
    assert len({pid for _, pid, *_ in two.marks}) == 5


def test_every_process_is_shown(two):
    shown = two.shown()
    assert (shown["front_end"], shown["engine_core"], shown["worker"]) == (1, 1, 2)


def test_two_ranks_say_what_one_says(two, plain):
    assert two.text() == plain


def test_an_op_runs_in_every_layer_of_every_step_on_every_rank(two, plain):
    two.call("take_calls")
    assert two.text() == plain
    assert two.call("take_calls").json()["results"] == ["40", "40"] == [str(8 * PER_STEP)] * 2
    two.call("scale", args=[0])
    assert two.text() != plain
    two.call("scale", args=[1])


def test_worker_methods_answer_whatever_one_rank_does(two):
    ranks = [json.loads(str(found)) for found in two.call("ok").json()["results"]]
    assert [rank for rank, _ in ranks] == [0, 1]
    streams = [two.stream(40) for _ in range(4)]
    for events in streams:
        next(events)
    began = time.monotonic()
    for method, statuses in (("boom", {500}), ("weird", {400, 500}), ("no_such_method", {400, 404, 501})):
        answer = two.call(method, timeout=30)
        assert answer.status_code in statuses
        assert answer.json()["error"]["message"]
    assert "Odd: odd one two" in two.call("boom").json()["error"]["message"]
    assert "2 s" in two.call("slow", timeout=2).json()["error"]["message"]
    assert time.monotonic() - began < 40
    for events in streams:
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"


def test_a_killed_rank_ends_the_server(two):
    """The last test with this server."""
    worker = two.find("hardpoint.processes.worker")[1]
    events = two.stream(900)
    next(events)
    killed = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert wait_until(lambda: two.health() == 503, 3)
    assert "error" in list(events)[-1]
    assert two.exit_status(10) == 1
    assert time.monotonic() - killed < 10
    two.assert_nothing_left()
    assert f"worker 1 (pid {worker}) was killed by SIGKILL" in two.log()


# -- TP 4, on the port of the one that died, with the model class in the cache -----------------------------------------


def test_four_ranks_are_six_runs_and_end_with_the_front_end(two, model, environment, plain, tmp_path):
    with Started(model, environment, tmp_path, "-tp", "4", port=two.port) as server:
        assert server.roles == {"front_end": 1, "engine_core": 1, "worker": 4}
        assert server.text() == plain
        server.process.kill()
        server.process.wait(60)
        server.assert_nothing_left()


# -- replicas ----------------------------------------------------------------------------------------------------------


def series(server: ServerProcess, name: str) -> dict[str, float]:
    """A metric by engine."""
    found = {}
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and 'engine="' in line:
            found[line.partition('engine="')[2][0]] = float(line.rpartition(" ")[2])
    return found


def test_replicas_share_requests_and_end_together(model, environment, plain, tmp_path):
    with Started(model, environment, tmp_path, "-dp", "2", *EXTENDED) as server:
        # Each engine core has a worker process, since there is more than one rank in all.
        assert server.stayed == {"front_end": 1, "engine_core": 2, "worker": 2}
        assert server.shown() == server.stayed
        assert [server.text() for _ in range(2)] == [plain, plain]
        assert series(server, "vllm:generation_tokens_total") == {"0": 8, "1": 8}
        server.http.headers["X-data-parallel-rank"] = "1"
        assert [server.text() for _ in range(3)] == [plain] * 3
        assert series(server, "vllm:generation_tokens_total") == {"0": 8, "1": 32}
        server.http.headers["X-data-parallel-rank"] = "2"
        assert server.complete().status_code == 400
        del server.http.headers["X-data-parallel-rank"]
        # One answer per worker of each replica.
        assert len(server.call("ok").json()["results"]) == 2
        victim = server.find("hardpoint.processes.engine_core")[1]
        # So slow that the streams are still running when an engine is killed.
        assert server.call("drag").status_code == 200
        streams = [server.stream(900) for _ in range(2)]
        for events in streams:
            next(events)
        assert wait_until(lambda: series(server, "vllm:num_requests_running") == {"0": 1, "1": 1})
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: server.health() == 503, 3)
        # Of all processes that end then, those of the other replica included, the one that was killed is named.
        for events in streams:
            assert f"(pid {victim}) was killed by SIGKILL" in list(events)[-1]["error"]["message"]
        assert server.exit_status(10) == 1
        server.assert_nothing_left()


# -- several API servers -----------------------------------------------------------------------------------------------


def ask_new_connection(server: ServerProcess) -> str:
    with httpx.Client(base_url=server.http.base_url, trust_env=False, timeout=60) as client:
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_api_servers_share_port_and_engine(model, environment, plain, tmp_path):
    with Started(model, environment, tmp_path, "--api-server-count", "2", port=free_port()) as server:
        assert server.stayed == {"front_end": 3, "engine_core": 1}
        pids = server.find("hardpoint.processes.api_server")
        answered: Counter = Counter()
        for _ in range(100):
            assert ask_new_connection(server) == plain
            lines = [line for line in server.log().splitlines() if "POST /v1/completions" in line]
            answered = Counter(line.partition("API server")[2].split("]")[0].split()[-1] for line in lines)
            if len(answered) == 2:
                break
        assert set(answered) == {str(pid) for pid in pids}
        # Whoever is asked shows all processes, and the figures of both.
        assert server.shown() == server.stayed
        assert series(server, "vllm:generation_tokens_total") == {"0": 8 * answered.total()}
        # A plugin's logger is in each, with the requests of its own server.
        counted: Counter = Counter()
        for line in (tmp_path / "stats").read_text().splitlines():
            pid, engine, tokens = line.split()
            assert engine == "0"
            counted[pid] += int(tokens)
        assert counted == {pid: 8 * count for pid, count in answered.items()}
        server.process.terminate()
        assert server.exit_status() == 0
        server.assert_nothing_left()


def test_an_api_server_that_dies_ends_the_others(model, environment, tmp_path):
    with Started(model, environment, tmp_path, "--api-server-count", "2") as server:
        os.kill(server.find("hardpoint.processes.api_server")[0], signal.SIGKILL)
        assert server.exit_status(10) == 1
        server.assert_nothing_left()
        assert "was killed by SIGKILL" in server.log()
