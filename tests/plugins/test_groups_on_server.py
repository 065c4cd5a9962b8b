"""Every entry-point group with its real consumer, on servers that many tests share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

COMMON = """
import json, os, time
from hardpoint.extensions.ledger import ledger

def mark(what, **more):
    line = {"what": what, "pid": os.getpid(), "role": ledger.role, "time": time.time(), **more}
    with open(os.environ["MARKS"], "a") as file:
        print(json.dumps(line), file=file, flush=True)
"""

GENERAL = """
from marks import mark

def register():
    from vllm import ModelRegistry
    mark("general")
    ModelRegistry.register_model("ToyLlamaForCausalLM", "toy_model:ToyLlamaForCausalLM")

def unnamed():
    mark("unnamed")

def denied():
    mark("denied")
"""

MODEL = """
from vllm.model_executor.models.llama import LlamaForCausalLM
class ToyLlamaForCausalLM(LlamaForCausalLM): pass
"""

PLATFORM = """
from marks import mark
def not_here():
    mark("platform")
def stale():
    import driver_that_is_gone
"""

STATS = """
import time
from marks import mark
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerBase

class Lines(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self.engine_index, self.tokens, self.records = engine_index, 0, 0
        mark("lines built", engine=engine_index)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.records += 1
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens

    def log(self):
        mark("lines log", tokens=self.tokens, records=self.records)

    def log_engine_initialized(self):
        mark("lines ready")

class Together(AggregateStatLoggerBase):
    def __init__(self, vllm_config, engine_indexes):
        self.tokens = 0
        mark("together built", engines=engine_indexes)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens

    def log(self):
        mark("together log", tokens=self.tokens)

    def log_engine_initialized(self): ...

class RaisesAtThird(Lines):
    def record(self, *args, **kwargs):
        self.records += 1
        if self.records == 3:
            raise KeyError("the third record")

    def log(self): ...

class Sleeps(Lines):
    def log(self):
        mark("sleep begins")
        time.sleep(2)
        mark("sleep ends")

not_a_logger = dict
"""

ENDPOINTS = """
from fastapi import HTTPException, Request
from marks import mark

class Admin:
    name = "e_admin"
    required_tasks = ("generate",)

    def attach_router(self, app):
        mark("attach")

        @app.get("/v1/admin/scheduler")
        async def scheduler(raw_request: Request):
            return await raw_request.app.state.admin_engine.collective_rpc("max_requests")

        @app.get("/version")
        async def version():
            return {"version": "mine"}

    async def init_state(self, engine_client, state, args):
        mark("init", port=args.port)
        state.admin_engine = engine_client

class Pooling(Admin):
    name = "e_pooling"
    required_tasks = ("embed",)

class Unnamed(Admin):
    name = "e_unnamed"
    required_tasks = None

class Extension:
    def max_requests(self):
        return self.vllm_config.scheduler_config.max_num_seqs
"""

IO = """
from marks import mark
mark("io import")
def one():
    return "io_one.Processor"
"""

PROCESSORS = """
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
class Quiet(AdapterLogitsProcessor):
    def is_argmax_invariant(self): return False
    def new_req_logits_processor(self, params): return None
"""

POINTS = {
    "vllm.general_plugins": {
        "g_mark": "general:register", "g_unnamed": "general:unnamed", "g_denied": "general:denied",
    },
    "vllm.platform_plugins": {"p_not_here": "platform_:not_here"},
    "vllm.stat_logger_plugins": {
        "s_lines": "stats:Lines", "s_together": "stats:Together", "s_raises": "stats:RaisesAtThird",
        "s_sleeps": "stats:Sleeps",
    },
    "vllm.endpoint_plugins": {
        "e_admin": "endpoints:Admin", "e_pooling": "endpoints:Pooling", "e_unnamed": "endpoints:Unnamed",
    },
    "vllm.io_processor_plugins": {"io_one": "io_one:one"},
    "vllm.logits_processors": {"l_quiet": "processors:Quiet"},
}  # fmt: skip
FILES = {
    "marks.py": COMMON,
    "general.py": GENERAL,
    "toy_model.py": MODEL,
    "platform_.py": PLATFORM,
    "stats.py": STATS,
    "endpoints.py": ENDPOINTS,
    "io_one.py": IO,
    "processors.py": PROCESSORS,
}
NAMED = "g_mark,g_denied,p_not_here,s_lines,s_together,s_raises,s_sleeps,e_admin,e_pooling,io_one"


class Marks:
    """What the plugins of one server noted."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "marks"

    def of(self, what: str) -> list[dict]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] == what and line["role"] != "inspector"]

    def tokens(self, what: str) -> int:
        """What a stat logger's last line says it has counted."""
        return ([0] + [line["tokens"] for line in self.of(what)])[-1]

    def roles(self, what: str) -> list[str]:
        return [line["role"] for line in self.of(what)]


def install(folder: Path, points: dict[str, dict[str, str]]) -> dict[str, str]:
    """Variables with which a server finds these entry points."""
    plugin = make_plugin(folder, "everything", FILES, points)
    return {"PYTHONPATH": plugin.environment()["PYTHONPATH"], "MARKS": str(folder / "marks")}


@pytest.fixture(scope="module")
def marks(tmp_path_factory):
    return Marks(tmp_path_factory.mktemp("everything"))


@pytest.fixture(scope="module")
def server(marks, tiny_llama):
    """Every group, most of it named; the list has an unknown name, a space and a comma too much."""
    variables = {
        **install(marks.file.parent, POINTS),
        "VLLM_PLUGINS": f"{NAMED}, s_lines,g_marc,",
        "HARDPOINT_PLUGINS_DENY": "g_denied",
        "VLLM_LOG_STATS_INTERVAL": "0.5",
    }
    flags = ["--api-key", "secret", "--worker-extension-cls", "endpoints.Extension", "--max-num-seqs", "7"]
    flags += ["--hf-overrides", '{"architectures": ["ToyLlamaForCausalLM"]}']
    with ServerProcess(tiny_llama, *flags, env=variables) as running:
        running.http.headers["Authorization"] = "Bearer secret"
        yield running.wait_ready()


@pytest.fixture(scope="module")
def used(server):
    """Tokens that three answers say they have."""
    answers = [server.complete(max_tokens=count, ignore_eos=True).json() for count in (3, 4, 5)]
    return sum(answer["usage"]["completion_tokens"] for answer in answers)


@pytest.fixture(scope="module")
def ledger(server, used):
    return server.ledger()


def told(ledger, kind: str, key: str, name: str) -> list[dict]:
    return [e for e in ledger if (e["kind"], e["key"], e["name"]) == (kind, key, name)]


def test_general_plugins_run_twice_for_one_worker(server, marks):
    found = marks.of("general")
    assert [line["role"] for line in found] == ["front_end", "engine_core"]
    assert [line["pid"] for line in found] == [server.process.pid, server.engine_core]


def test_what_is_not_named_or_denied_does_not_run(server, marks, ledger):
    assert marks.of("unnamed") == marks.of("denied") == []
    [one, _] = told(ledger, "skip", "general", "g_unnamed")
    assert one["detail"] == "not named in VLLM_PLUGINS"
    assert {e["detail"] for e in told(ledger, "skip", "general", "g_denied")} == {"named in HARDPOINT_PLUGINS_DENY"}


@pytest.mark.parametrize(
    "sentence",
    [
        "VLLM_PLUGINS names 'g_marc', which matches no plugin; did you mean 'g_mark'?",
        "VLLM_PLUGINS has ' s_lines', and names are compared with their spaces: it matches no plugin; write 's_lines'",
        "VLLM_PLUGINS has an empty part, such as a comma at an end: it names nothing",
    ],
)
def test_odd_names_are_told_once_in_each_process(server, sentence):
    lines = server.lines(sentence)
    assert len(lines) == 2
    assert all(line.startswith("WARNING") for line in lines)


def test_each_process_sums_up_in_one_line(server):
    lines = server.lines(" plugins of ")
    assert [line.partition(" plugins of ")[2].partition(" ")[0] for line in lines] == ["front_end", "engine_core"]
    assert all(" g_mark (everything 1.0, " in line for line in lines)
    assert all("g_unnamed (not named in VLLM_PLUGINS)" in line for line in lines)


def test_a_detector_that_does_not_apply_is_quiet(server, marks, ledger):
    assert marks.roles("platform") == ["front_end", "engine_core"]
    assert server.lines("WARNING", "p_not_here") == []
    assert [e["detail"] for e in told(ledger, "skip", "platforms", "p_not_here")] == [
        "its detector says it does not apply"
    ] * 2


def test_a_stat_logger_is_built_told_and_called_each_interval(server, marks, used):
    [built] = [line for line in marks.of("lines built") if line["engine"] == 0][:1]
    assert built["role"] == "front_end"
    assert marks.of("lines ready")
    assert wait_until(lambda: marks.tokens("lines log") == used)
    times = [line["time"] for line in marks.of("lines log")]
    assert times[-1] - times[0] >= 0.4 * (len(times) - 1)


def test_an_aggregate_logger_gets_all_engines_at_once(server, marks, used):
    [built] = marks.of("together built")
    assert built["engines"] == [0]
    assert wait_until(lambda: marks.tokens("together log") == used)


def test_a_logger_that_raises_is_told_once_and_counted_and_requests_go_on(server, used):
    lines = server.lines("stats.RaisesAtThird: record raised KeyError")
    assert len(lines) == 1
    assert lines[0].startswith("ERROR")
    assert 'hardpoint:stat_logger_faults_total{logger="stats.RaisesAtThird",method="record"} 1.0' in (
        server.http.get("/metrics").text
    )
    assert server.complete().status_code == 200


def test_a_logger_that_sleeps_holds_up_nobody(server, marks):
    begun = len(marks.of("sleep begins"))
    assert wait_until(lambda: len(marks.of("sleep begins")) > begun)
    started = time.monotonic()
    while not answered_while_asleep(server, marks):
        assert time.monotonic() - started < 20


def answered_while_asleep(server, marks) -> bool:
    before = len(marks.of("sleep ends"))
    asleep = len(marks.of("sleep begins")) > before
    assert server.complete(max_tokens=2).status_code == 200
    return asleep and len(marks.of("sleep ends")) == before


def test_a_route_reaches_the_workers_and_one_of_ours_is_replaced(server, marks):
    assert marks.roles("attach") == marks.roles("init") == ["front_end"]
    assert marks.of("init")[0]["port"] == server.port
    assert server.http.get("/v1/admin/scheduler").json() == [7]
    assert server.http.get("/version").json() == {"version": "mine"}
    assert "everything 1.0, vllm.endpoint_plugins: e_admin overrides GET /version (built in)" in server.log()


def test_the_api_key_covers_a_plugins_route(server):
    answer = server.http.get("/v1/admin/scheduler", headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401


def test_an_endpoint_for_another_task_is_left_out(server, ledger):
    [skip] = told(ledger, "skip", "endpoints", "e_pooling")
    assert skip["detail"] == "it requires one of the tasks embed; this server has generate"
    assert f"endpoint plugin 'e_pooling' (everything 1.0) is left out: {skip['detail']}" in server.log()


def test_an_io_processor_is_listed_and_nobody_asks_for_it(server, marks):
    groups = {group["key"]: group for group in server.http.get("/plugins").json()["groups"]}
    assert [one["name"] for one in groups["io_processors"]["installed"]] == ["io_one"]
    assert groups["io_processors"]["state"] == "built"
    assert marks.of("io import") == []


def test_a_model_of_a_plugin_is_served(server, ledger):
    assert [e["role"] for e in told(ledger, "register", "models", "ToyLlamaForCausalLM")] == [
        "front_end",
        "engine_core",
    ]
    assert server.complete().json()["usage"]["completion_tokens"] == 8


def test_metrics_count_loads_and_skips(server):
    text = server.http.get("/metrics").text
    assert 'hardpoint:plugin_loads_total{key="general",name="g_mark",role="engine_core"} 1.0' in text
    assert 'hardpoint:plugin_skips_total{key="general",name="g_unnamed",role="front_end"} 1.0' in text


# -- no list, statistics off, and plugins that fail without harm -----------------------------------------------------

BROKEN = {
    "b_import": "package_that_is_not_there:register",
    "b_attribute": "general:no_such_function",
    "b_class": "endpoints:Extension",
}


@pytest.fixture(scope="module")
def unset(tmp_path_factory, tiny_llama):
    """VLLM_PLUGINS is not set; three entry points of a general plugin do not work, and a detector fails."""
    found = Marks(tmp_path_factory.mktemp("unset"))
    points = {
        "vllm.general_plugins": {"a_ok": "general:register", **BROKEN, "c_ok": "general:unnamed"},
        "vllm.platform_plugins": {"p_stale": "platform_:stale"},
        "vllm.stat_logger_plugins": {"s_lines": "stats:Lines"},
        "vllm.endpoint_plugins": {"e_admin": "endpoints:Admin"},
    }
    variables = {**install(found.file.parent, points), "VLLM_LOG_STATS_INTERVAL": "0.5"}
    with ServerProcess(tiny_llama, "--disable-log-stats", env=variables) as running:
        yield running.wait_ready(), found


@pytest.mark.parametrize("name", ["b_import", "b_attribute"])
def test_an_import_that_fails_is_one_error_in_each_process_and_others_load(unset, name):
    server, marks = unset
    errors = server.lines(f"plugin '{name}' cannot be imported from '{BROKEN[name]}'")
    assert len(errors) == 2
    assert all(line.startswith("ERROR") and "everything 1.0" in line for line in errors)
    assert all(f"HARDPOINT_PLUGINS_DENY={name}" in line for line in errors)
    assert marks.roles("general") == marks.roles("unnamed") == ["front_end", "engine_core"]


def test_a_class_is_called_like_a_function(unset):
    server, _ = unset
    calls = [e["role"] for e in server.ledger() if (e["kind"], e["key"], e["name"]) == ("call", "general", "b_class")]
    assert calls == ["front_end", "engine_core"]


def test_a_detector_that_fails_is_one_warning_with_the_platform_used_instead(unset):
    server, _ = unset
    warnings = server.lines("WARNING", "platform plugin 'p_stale': its detector failed")
    assert len(warnings) == 2
    for line in warnings:
        assert "ModuleNotFoundError: No module named 'driver_that_is_gone'" in line
        assert "hardpoint.platforms.cpu.CpuPlatform is used instead" in line


def test_without_a_list_endpoints_wait_to_be_named(unset):
    server, marks = unset
    assert len(server.lines("WARNING", "so none of them loads: e_admin. Fix: name them")) == 1
    assert server.http.get("/v1/admin/scheduler").status_code == 404
    assert marks.of("attach") == []
    assert len(server.lines("VLLM_PLUGINS is not set: all plugins load, except endpoint plugins")) == 2


def test_a_stat_logger_plugin_gets_numbers_although_statistics_are_off(unset):
    server, marks = unset
    tokens = server.complete(max_tokens=6, ignore_eos=True).json()["usage"]["completion_tokens"]
    assert wait_until(lambda: marks.tokens("lines log") >= tokens)
    assert server.lines("Engine 0: prompt") == [], "the console line is what the flag turns off"


# -- starts that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "flags", "names", "complaints"),
    [
        (
            {"vllm.stat_logger_plugins": {"s_wrong": "stats:not_a_logger"}},
            [],
            "s_wrong",
            ["stat logger plugin 's_wrong' is the class builtins.dict, not a StatLoggerBase subclass"],
        ),
        (
            {"vllm.general_plugins": {"a_ok": "general:register", "b_import": BROKEN["b_import"]}},
            ["--plugin-policy", "strict"],
            "a_ok,b_import,c_gone",
            [
                "in front_end: 2 plugin problems:",
                "plugin 'b_import' cannot be imported",
                "VLLM_PLUGINS names 'c_gone', which matches no plugin",
            ],
        ),
    ],
    ids=["wrong kind", "strict"],
)
def test_a_start_that_the_rules_stop(tmp_path, tiny_llama, points, flags, names, complaints):
    with ServerProcess(tiny_llama, *flags, env={**install(tmp_path, points), "VLLM_PLUGINS": names}) as server:
        assert server.exit_status() == 1
        [error] = [line for line in server.log().splitlines() if line.startswith("hardpoint: error:")]
        assert all(complaint in error for complaint in complaints), error
        assert "fix: " in server.log()
        assert os.listdir(server.sockets) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--io-processor-plugin", "io_one"], "io_processor_plugin is 'io_one', and the model generates text"),
    ],
)
def test_what_no_consumer_exists_for_is_refused_by_name(tmp_path, tiny_llama, flags, complaint):
    with ServerProcess(tiny_llama, *flags, env=install(tmp_path, POINTS)) as server:
        assert server.exit_status() in (1, 2)
        assert complaint in server.log()
        assert "Traceback" not in server.log()
