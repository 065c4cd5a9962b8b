"""An engine and its HTTP server started apart: who lives, who dies, who is let in."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from rpc_extension import Extension

from hardpoint import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from hardpoint.errors import CodecError, ConfigError, EngineDeadError
from hardpoint.testing import make_plugin
from process_tools import wait_until
from server_process import ServerProcess, free_port

pytestmark = pytest.mark.server

EXTENSION = f"{Extension.__module__}.{Extension.__qualname__}"
KEYED = {
    "HARDPOINT_LINK_KEY": "between the tests of this module",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "PYTHONPATH": os.path.dirname(__file__),
}


def engine_at(port, model, *flags, env=None):
    return ServerProcess(model, "--data-parallel-rpc-port", str(port), *flags, env=env, headless=True)


def server_of(port, model, *flags, env=None):
    where = ("--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1")
    return ServerProcess(model, *where, "--data-parallel-rpc-port", str(port), *flags, env=env)


def says(process, text, within_s=60.0):
    ok = wait_until(lambda: text in process.log() or process.process.poll() is not None, within_s)
    assert ok, process.log()
    assert text in process.log(), process.log()
    return True


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture(scope="module")
def engine(tiny_llama, port, tmp_path_factory):
    """Shared by the tests that leave it alive. It has a plugin that its servers do not have."""
    points = {
        "vllm.general_plugins": {"far_away": "far_away:register"},
        "vllm.stat_logger_plugins": {"far_counter": "far_away:Logger"},
    }
    plugin = make_plugin(tmp_path_factory.mktemp("plugin"), "far-away", "def register(): pass", points)
    paths = {"PYTHONPATH": os.pathsep.join([KEYED["PYTHONPATH"], plugin.environment()["PYTHONPATH"]])}
    with engine_at(port, tiny_llama, "--worker-extension-cls", EXTENSION, env={**KEYED, **paths}) as engine:
        yield engine


def test_a_server_answers_with_an_engine_elsewhere_as_with_its_own(engine, tiny_llama, port):
    with server_of(port, tiny_llama, env=KEYED) as server, ServerProcess(tiny_llama) as plain:
        server.wait_ready()
        assert server.find("hardpoint.processes.engine_core") == []
        for asked in ({"temperature": 0}, {"n": 2, "temperature": 1, "seed": 3}):
            ours, theirs = (
                one.complete(max_tokens=24, logprobs=3, **asked).json()["choices"]
                for one in (server, plain.wait_ready())
            )
            for mine, other in zip(ours, theirs, strict=True):
                assert mine["text"] == other["text"]
                values = [choice["logprobs"]["token_logprobs"] for choice in (mine, other)]
                np.testing.assert_allclose(*values, atol=1e-3)
        assert list(server.stream(20))[-1]["choices"][0]["finish_reason"] == "length"
        # What the engine measures and who loaded what there is known here.
        assert "vllm:kv_cache_usage_perc" in server.http.get("/metrics").text
        entries = server.http.get("/plugins").json()["ledger"]
        assert server.process.pid in {entry["pid"] for entry in entries}
        loaded = {entry["pid"] for entry in entries if (entry["kind"], entry["name"]) == ("call", "far_away")}
        assert loaded == {engine.process.pid, engine.engine_core}
        assert "far_counter" in {entry["name"] for entry in entries if entry["kind"] == "skip"}

        def call(method):
            return server.http.post("/collective_rpc", json={"method": method})

        assert call("ok").json()["results"][0]["rank"] == 0
        assert "cross between machines" in call("weird").json()["error"]["message"]
        assert server.complete(max_tokens=2).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 0, server.log()
        server.assert_nothing_left(2)
    assert says(engine, "it has ended; 0 requests of it are aborted", 5)


@contextmanager
def using(model, link):
    """A front end in this process."""
    args = AsyncEngineArgs(model=str(model), data_parallel_size_local=0, data_parallel_rpc_port=link)
    with asyncio.Runner() as runner:
        llm = AsyncLLM.from_engine_args(args)
        try:
            yield llm, runner.run
        finally:
            llm.shutdown()


async def last(stream):
    return [output async for output in stream][-1]


def test_functions_do_not_cross_to_an_engine_elsewhere(engine, tiny_llama, port, monkeypatch):
    for name in ("HARDPOINT_LINK_KEY", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.setenv(name, KEYED[name])
    with using(tiny_llama, port) as (llm, run):
        assert run(llm.collective_rpc("ok", args=(4,)))[0]["value"] == 4
        with pytest.raises(CodecError, match="cross between machines"):
            run(llm.collective_rpc(lambda worker: worker.rank))


def test_a_killed_server_frees_the_engine_for_the_next_one(engine, tiny_llama, port):
    with server_of(port, tiny_llama, env=KEYED) as first:
        first.wait_ready()
        events = first.stream()
        next(events)
        first.process.kill()
        killed = time.monotonic()
        with server_of(port, tiny_llama, env=KEYED) as second:
            assert says(engine, "1 requests of it are aborted", 10)
            assert time.monotonic() - killed < 10
            second.wait_ready()
            assert second.complete(max_tokens=3).status_code == 200
            with server_of(port, tiny_llama, env=KEYED) as third:
                assert says(third, f"is serving another front end, {socket.gethostname()}:{second.process.pid}")


def test_those_who_do_not_belong_to_the_engine_are_told_why(engine, tiny_llama, make_tiny_llama, port):
    other = make_tiny_llama(num_hidden_layers=1)
    soon = {**KEYED, "VLLM_ENGINE_READY_TIMEOUT_S": "2"}
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as stack:
        taken_port = taken.getsockname()[1]
        started = [
            (server_of(port, other, env=KEYED), f"serves another model: {tiny_llama}, "),
            (server_of(port, tiny_llama, "--dtype", "bfloat16", env=KEYED), "another value of --dtype"),
            (server_of(port, tiny_llama, env={"HARDPOINT_LINK_KEY": "x" * 20}), "HARDPOINT_LINK_KEY is another"),
            (server_of(free_port(), tiny_llama, env=soon), "nothing listens there yet"),
            (engine_at(taken_port, tiny_llama), f"port {taken_port} on 127.0.0.1 is in use"),
        ]
        for process, _ in started:
            stack.enter_context(process)
        for process, words in started:
            assert process.exit_status() == 1, process.log()
            log = process.log()
            assert words in log.rpartition("hardpoint: error:")[2], log
            assert "Traceback" not in log
            assert "engine core" not in log
            process.assert_nothing_left(2)
    assert engine.process.poll() is None


def test_combinations_that_mean_nothing_are_refused(tiny_llama):
    combinations = [
        ("--headless", "--port", "8001", "--api-key", "k"), ("--headless", "--data-parallel-size-local", "0"),
        ("--data-parallel-address", "localhost"), ("--headless", "--data-parallel-address", "0.0.0.0"),
        ("--port", str(free_port()), "--data-parallel-size-local", "2"), ("--headless", "--data-parallel-size", "2"),
    ]  # fmt: skip
    command = [sys.executable, "-m", "hardpoint", "serve", str(tiny_llama)]
    started = [
        subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in combinations
    ]
    for process, words in zip(started, combinations, strict=True):
        said, _ = process.communicate(timeout=200)
        assert process.returncode in (1, 2)
        assert words[-2] in said, said
        assert "Traceback" not in said


def test_engines_for_scripts_are_not_elsewhere(tiny_llama):
    with pytest.raises(ConfigError, match="an engine that is elsewhere serves"):
        LLM(str(tiny_llama), data_parallel_size_local=0)
    with pytest.raises(ConfigError, match="--data-parallel-address has no meaning"):
        LLM(str(tiny_llama), data_parallel_address="localhost")


def test_an_engine_that_is_killed_ends_its_server(tiny_llama):
    link = free_port()
    with engine_at(link, tiny_llama) as engine, server_of(link, tiny_llama) as server:
        server.wait_ready()
        events = server.stream()
        next(events)
        killed = time.monotonic()
        engine.process.kill()
        assert wait_until(lambda: server.health() == 503, 5)
        assert "connection was closed" in list(events)[-1]["error"]["message"]
        assert server.exit_status(10) == 1
        assert time.monotonic() - killed < 10
        for process in (engine, server):
            process.assert_nothing_left()


@pytest.mark.parametrize("orderly", [True, False])
def test_a_front_end_learns_how_its_engine_ended(tiny_llama, orderly):
    link = free_port()
    with engine_at(link, tiny_llama) as engine:
        with using(tiny_llama, link) as (llm, run):
            # Found beforehand: looking takes longer than a small model needs for its tokens.
            pid, number = (engine.process.pid, signal.SIGTERM) if orderly else (engine.engine_core, signal.SIGKILL)
            stream = llm.generate("The", SamplingParams(n=16, max_tokens=900, ignore_eos=True), "r")
            run(anext(stream))
            os.kill(pid, number)
            with pytest.raises(EngineDeadError, match="told to stop" if orderly else "killed by SIGKILL"):
                run(last(stream))
        assert engine.exit_status(10) == (0 if orderly else 1), engine.log()
        assert "is killed" not in engine.log()
        engine.assert_nothing_left(2)
