"""Stat loggers, endpoints and middleware of plugins in a real server (B19, B20)."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from hardpoint.testing import make_plugin, plugin_environment

pytestmark = pytest.mark.server

STAT_LOGGERS = '''
import json, os, time
from hardpoint.contracts.stat_logger import StatLoggerBase


class Recorder(StatLoggerBase):
    """A JSON line for each call."""

    def __init__(self, vllm_config, engine_index=0):
        self.tokens = self.finished = 0
        self.line(built=engine_index)

    def line(self, **facts):
        with open(os.environ["STATS_FILE"], "a") as file:
            file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **facts}) + "\\n")

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            self.finished += len(iteration_stats.finished_requests)

    def log_engine_initialized(self):
        self.line(ready=True)

    def log(self):
        self.line(tokens=self.tokens, finished=self.finished)


class Bad(StatLoggerBase):
    """Raises at its third step, and always when it writes."""

    def __init__(self, vllm_config, engine_index=0):
        self.steps = 0

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.steps += 1
        if self.steps == 3:
            raise RuntimeError("third step")

    def log_engine_initialized(self):
        pass

    def log(self):
        raise RuntimeError("cannot write")


class Slow(StatLoggerBase):
    """Takes half a minute to write."""

    def __init__(self, vllm_config, engine_index=0):
        pass

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        pass

    def log_engine_initialized(self):
        pass

    def log(self):
        time.sleep(30)


NotALogger = object()
'''

ENDPOINTS = '''
from fastapi import HTTPException, Request


class Admin:
    """Asks every worker for something."""

    name = "admin"
    required_tasks = ("generate",)

    def attach_router(self, app):
        @app.get("/v1/admin/ranks")
        async def ranks(raw_request: Request):
            return {"ranks": await raw_request.app.state.admin_client.collective_rpc("check_health")}

        @app.get("/version")
        async def version():
            return {"version": "mine"}

    async def init_state(self, engine_client, state, args):
        state.admin_client = engine_client


def not_served():
    class Embedder:
        name = "embedder"
        required_tasks = ("embed",)
        def attach_router(self, app): raise AssertionError("must not be attached")
        async def init_state(self, *args): pass
    return Embedder()


def broken():
    raise LookupError("factory broke")
'''

MIDDLEWARE = """
async def func(request, call_next):
    if request.headers.get("x-bad"):
        raise KeyError("middleware broke")
    response = await call_next(request)
    response.headers.append("x-order", "func")
    return response


async def reader(request, call_next):
    body = await request.body()
    response = await call_next(request)
    response.headers["x-body-bytes"] = str(len(body))
    return response


class Asgi:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-order", b"asgi")]
            await send(message)

        await self.app(scope, receive, marked)
"""

POINTS = {
    "vllm.stat_logger_plugins": {"recorder": "p_loggers:Recorder", "bad": "p_loggers:Bad", "slow": "p_loggers:Slow"},
    "vllm.endpoint_plugins": {
        "admin": "p_endpoints:Admin", "embedder": "p_endpoints:not_served", "broken": "p_endpoints:broken",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plugins")


@pytest.fixture(scope="module")
def loaded(start_server, folder):
    """One server with all of them; its stats file beside it."""
    sources = {"p_loggers.py": STAT_LOGGERS, "p_endpoints.py": ENDPOINTS, "mw.py": MIDDLEWARE}
    plugin = make_plugin(folder, "p-all", sources, POINTS)
    stats = folder / "stats.jsonl"
    environment = plugin_environment(
        [plugin],
        STATS_FILE=str(stats),
        VLLM_LOG_STATS_INTERVAL="0.5",
        VLLM_PLUGINS="recorder,bad,slow,admin,embedder,broken",
    )
    flags = ["--middleware", "mw.func", "--middleware", "mw.Asgi", "--middleware", "mw.reader"]
    server = start_server(*flags, env=environment)
    server.stats = stats
    yield server
    server.stop()


def lines_of(server) -> list[dict]:
    return [json.loads(line) for line in server.stats.read_text().splitlines()]


def test_stat_logger_writes_regularly_and_counts_what_usage_says(loaded, eventually):
    usages = [
        loaded.http.post("/v1/completions", json={"prompt": "The", "max_tokens": 9, "n": n}).json()["usage"]
        for n in (1, 2, 3)
    ]
    generated = sum(usage["completion_tokens"] for usage in usages)
    eventually(lambda: lines_of(loaded)[-1].get("tokens") == generated)
    lines = lines_of(loaded)
    assert [("built" in line, "ready" in line) for line in lines[:2]] == [(True, False), (False, True)]
    assert {line["pid"] for line in lines} == {loaded.process.pid}
    assert lines[-1]["finished"] == 6
    written = [line["at"] for line in lines if "tokens" in line]
    # It goes on each interval.
    eventually(lambda: len([line for line in lines_of(loaded) if "tokens" in line]) > len(written))


def test_bad_and_slow_loggers_hurt_nobody(loaded, eventually):
    began = time.monotonic()
    for _ in range(6):
        assert loaded.http.post("/v1/completions", json={"prompt": "The", "max_tokens": 4}).status_code == 200
    # The slow logger is inside its half minute all the time.
    assert time.monotonic() - began < 20
    log = loaded.log()
    assert log.count("third step\n") <= 2, "told more than once"
    assert "third step" in log
    eventually(lambda: "switched off" in loaded.log())
    assert loaded.metric("hardpoint:stat_logger_faults_total", "Bad", 'method="record"') == 1


def test_endpoint_plugins_follow_their_rules(loaded):
    assert loaded.http.get("/v1/admin/ranks").json() == {"ranks": [None]}
    assert httpx.get(f"{loaded.url}/v1/admin/ranks", trust_env=False).status_code == 401
    assert loaded.http.get("/version").json() == {"version": "mine"}
    log = loaded.log()
    assert "overrides GET /version" in log
    assert "factory broke" in log
    assert "'embedder'" in log
    entries = loaded.http.get("/plugins").json()["ledger"]
    kinds = {(entry["kind"], entry["name"]) for entry in entries if entry["key"] == "endpoints"}
    assert {("call", "admin"), ("skip", "embedder"), ("fault", "broken"), ("override", "GET /version")} <= kinds


def test_middleware_in_order_with_streams_going_through(loaded):
    body = {"prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0}
    with loaded.http.stream("POST", "/v1/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.headers.get_list("x-order") == ["asgi", "func"]
    assert int(answer.headers["x-body-bytes"]) > 20
    assert len(events) > 6
    bad = loaded.http.post("/v1/completions", json=body, headers={"x-bad": "1"})
    assert (bad.status_code, bad.json()["error"]["type"]) == (500, "InternalServerError")
    assert loaded.http.get("/health").status_code == 200


def test_wrong_type_stops_the_start_and_names_the_plugin(start_server, folder, tmp_path):
    plugin = make_plugin(
        tmp_path, "p-wrong", {"p_wrong.py": STAT_LOGGERS}, {"vllm.stat_logger_plugins": {"wrong": "p_wrong:NotALogger"}}
    )
    with pytest.raises(AssertionError) as caught:
        start_server(env=plugin_environment([plugin]))
    assert "'wrong'" in str(caught.value)
    assert "StatLoggerBase" in str(caught.value)


def test_bad_middleware_path_stops_the_start(start_server):
    with pytest.raises(AssertionError) as caught:
        start_server("--middleware", "no_such.module.Name")
    assert "no_such.module.Name" in str(caught.value)
    assert "the model is loaded" not in str(caught.value)


def test_stats_off_still_serves_the_plugins_loggers(start_server, folder, tmp_path, eventually):
    """The rule: --disable-log-stats silences our own line; a plugin that wants numbers gets them, and its timer."""
    plugin = make_plugin(
        tmp_path,
        "p-quiet",
        {"p_quiet.py": STAT_LOGGERS},
        {"vllm.stat_logger_plugins": {"recorder": "p_quiet:Recorder"}},
    )
    stats = tmp_path / "stats.jsonl"
    environment = plugin_environment([plugin], STATS_FILE=str(stats), VLLM_LOG_STATS_INTERVAL="0.3")
    server = start_server("--disable-log-stats", env=environment)
    server.stats = stats
    used = server.http.post("/v1/completions", json={"prompt": "The", "max_tokens": 3}).json()["usage"]
    eventually(lambda: lines_of(server)[-1].get("tokens") == used["completion_tokens"])
    assert "tokens/s" not in server.log()
    server.stop()
