"""Plugins in a script's own engine: started by exec, in the same process, and after a fork of a booted process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hardpoint.testing import make_plugin

pytestmark = pytest.mark.server

FORCED = 333
PLUGIN = """
import json, os
from hardpoint.extensions.ledger import ledger
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

def mark(what, **more):
    with open(os.environ["MARKS"], "a") as file:
        print(json.dumps({"what": what, "role": ledger.role, "pid": os.getpid(), **more}), file=file, flush=True)

def register():
    mark("general")

class Counter(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.tokens = 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens

    def log(self):
        mark("log", tokens=self.tokens)

    def log_engine_initialized(self):
        mark("ready")

class Forces(LogitsProcessor):
    def __init__(self, vllm_config, req_states):
        self.forced = [False] * req_states.max_num_reqs

    def add_request(self, slot, params):
        self.forced[slot] = bool((params.extra_args or {}).get("force"))
        return self.forced[slot]

    def apply(self, logits, ctx):
        rows = [row for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()) if self.forced[slot]]
        logits[rows] = float("-inf")
        logits[rows, FORCED] = 0.0
        return logits

class Given(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        if not (params.extra_args or {}).get("given"):
            return None
        return lambda output_ids, logits: logits.fill_(0.0).scatter_(0, logits.new_tensor([7]).long(), 1.0)
""".replace("FORCED", str(FORCED))

SCRIPT = """
import asyncio, json, os, sys
from hardpoint import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams, compat
from hardpoint.extensions.boot import load_general_plugins

compat.install()
import offline
model, how = sys.argv[1:]
sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}

def offline_engine():
    llm = LLM(model, logits_processors=[offline.Given], kv_cache_memory_bytes=64 << 20)
    asked = [{}, {"force": 1}, {"given": 1}]
    outputs = llm.generate(["one"] * 3, [SamplingParams(**sampling, extra_args=extra) for extra in asked])
    return [list(output.outputs[0].token_ids) for output in outputs]

async def asynchronous_engine():
    args = AsyncEngineArgs(model=model, logits_processors=["offline:Given"], kv_cache_memory_bytes=64 << 20)
    engine = AsyncLLM.from_engine_args(args)
    params = SamplingParams(**sampling, extra_args={"given": 1})
    last = [output async for output in engine.generate("one", params, "r")][-1]
    await asyncio.sleep(1)
    engine.shutdown()
    return [list(last.outputs[0].token_ids)]

def report():
    found = asyncio.run(asynchronous_engine()) if how == "async" else offline_engine()
    print("RESULT", json.dumps(found), flush=True)

if how == "fork":
    load_general_plugins()
    child = os.fork()
    if child == 0:
        report()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
report()
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    points = {
        "vllm.general_plugins": {"general": "offline:register"},
        "vllm.stat_logger_plugins": {"counter": "offline:Counter"},
        "vllm.logits_processors": {"forces": "offline:Forces"},
    }
    return make_plugin(tmp_path_factory.mktemp("offline"), "offline", PLUGIN, points)


@pytest.fixture
def run(plugin, tiny_llama, tmp_path):
    """Run the script; returns the token ids it got and what its plugins marked."""

    def go(how: str, **variables: str) -> tuple[list[list[int]], list[dict]]:
        environment = plugin.environment(
            MARKS=str(tmp_path / "marks"), OMP_NUM_THREADS="1", VLLM_LOG_STATS_INTERVAL="0.3", **variables
        )
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tiny_llama), how],
            env=environment, capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        marks = [json.loads(line) for line in (tmp_path / "marks").read_text().splitlines()]
        return json.loads(result.removeprefix("RESULT ")), marks

    return go


@pytest.mark.parametrize(
    ("how", "variables", "roles"),
    [
        ("exec", {}, ["front_end", "engine_core"]),
        ("one process", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, ["front_end"]),
        ("fork", {}, ["front_end", "front_end", "engine_core"]),
    ],
)
def test_a_script_has_its_plugins_however_its_engine_is_started(run, how, variables, roles):
    [plain, forced, given], marks = run(how, **variables)
    assert forced == [FORCED] * 6, "by entry point"
    assert given == [7] * 6, "by LLM(logits_processors=[class])"
    assert FORCED not in plain
    general = [mark for mark in marks if mark["what"] == "general"]
    assert [mark["role"].split("+")[0] for mark in general] == roles
    assert len({mark["pid"] for mark in general}) == len(roles), "once per process, also after a fork"
    assert [mark["tokens"] for mark in marks if mark["what"] == "log"][-1] == 18


def test_a_stat_logger_is_called_under_an_asynchronous_engine_too(run):
    [given], marks = run("async")
    assert given == [7] * 6
    logs = [mark["tokens"] for mark in marks if mark["what"] == "log"]
    assert logs[-1] == 6
    assert len(logs) >= 3, "each interval, without anybody asking"
