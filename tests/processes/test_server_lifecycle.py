"""A server and its processes: who ends with whom, how requests end, what is left (bug B42, B45)."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import httpx
import psutil
import pytest
from rpc_extension import Extension

from hardpoint.testing import make_plugin
from process_tools import ended, wait_until
from server_process import ServerProcess, free_port

pytestmark = pytest.mark.server

# Starts a helper in every process that loads it, one of them in a session of its own.
HELPER_PLUGIN = """
import subprocess, sys

def register():
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


@pytest.fixture
def helper_plugin(tmp_path):
    plugin = make_plugin(
        tmp_path / "plugin", "helpers", HELPER_PLUGIN, {"vllm.general_plugins": {"helpers": "helpers:register"}}
    )
    return {"PYTHONPATH": plugin.environment()["PYTHONPATH"]}


def test_a_killed_front_end_takes_everything_with_it_and_the_port_is_free_again(tiny_llama, helper_plugin):
    with ServerProcess(tiny_llama, "--distributed-executor-backend", "mp", env=helper_plugin) as server:
        server.wait_ready()
        helpers = [p for p in server.processes() if p.name() == "sleep"]
        assert len(helpers) == 6  # Of the front end, the engine core and the worker.
        assert os.listdir(server.sockets) == []  # Not needed once connected.
        server.process.kill()
        server.exit_status()
        server.assert_nothing_left()
        with ServerProcess(tiny_llama, port=server.port) as second:
            second.wait_ready()
            assert second.complete().status_code == 200
            second.process.send_signal(signal.SIGTERM)
            assert second.exit_status() == 0, second.log()
            second.assert_nothing_left(2)


def test_a_killed_engine_core_is_said_at_once_and_ends_the_server(tiny_llama, helper_plugin):
    with ServerProcess(tiny_llama, env=helper_plugin) as server:
        server.wait_ready()
        engine_core = server.engine_core  # Found beforehand: looking may take longer than a stream does.
        events = server.stream()
        assert next(events)["choices"][0]["text"] is not None
        killed = time.monotonic()
        os.kill(engine_core, signal.SIGKILL)
        assert wait_until(lambda: server.health() == 503, 2)
        rest = list(events)
        assert "killed by SIGKILL" in rest[-1]["error"]["message"]
        assert "SIGKILL" in server.complete().json()["error"]["message"]
        assert server.exit_status(10) == 1
        assert time.monotonic() - killed < 10
        server.assert_nothing_left()
        assert "was killed by SIGKILL" in server.log()


def test_a_killed_worker_ends_the_server_and_is_named(tiny_llama, helper_plugin):
    with ServerProcess(tiny_llama, "--distributed-executor-backend", "mp", env=helper_plugin) as server:
        server.wait_ready()
        [worker] = server.find("hardpoint.processes.worker")
        events = server.stream()
        next(events)
        os.kill(worker, signal.SIGKILL)
        assert wait_until(lambda: server.health() == 503, 3)
        assert "error" in list(events)[-1]
        assert server.exit_status(10) == 1
        server.assert_nothing_left()
        assert f"worker (pid {worker}) was killed by SIGKILL" in server.log()


def test_a_server_may_stay_when_its_engine_has_ended(tiny_llama):
    with ServerProcess(tiny_llama, env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}) as server:
        server.wait_ready()
        os.kill(server.engine_core, signal.SIGTERM)
        assert wait_until(lambda: server.health() == 503, 5)
        time.sleep(4)  # Longer than a server without the variable would stay.
        assert server.health() == 503
        assert server.http.get("/v1/models").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_status() == 1
        server.assert_nothing_left(2)


def test_requests_end_with_an_error_when_there_is_no_time_to_drain(tiny_llama, helper_plugin):
    with ServerProcess(tiny_llama, env=helper_plugin) as server:
        server.wait_ready()
        events = server.stream()
        next(events)
        # Twice within a tenth of a second: the second must not cut the clean-up short.
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert "shutting down" in list(events)[-1]["error"]["message"]
        assert server.exit_status() == 0, server.log()
        server.assert_nothing_left(2)
        assert "already stopping" in server.log()


def test_running_requests_finish_within_the_shutdown_timeout(tiny_llama):
    with ServerProcess(tiny_llama, "--shutdown-timeout", "30") as server:
        server.wait_ready()
        events = server.stream(500)
        next(events)
        # As a service manager does it: every process of the group is told at once.
        for process in server.processes():
            process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: not _accepts(server.port), 2)
        rest = list(events)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0, server.log()
        server.assert_nothing_left(2)
        assert "has ended" not in server.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_can_be_interrupted(tiny_llama, number):
    previous = signal.signal(number, signal.SIG_DFL)  # Were it ignored, as nohup has it, so it would be below.
    try:
        server = ServerProcess(tiny_llama)
    finally:
        signal.signal(number, previous)
    with server:
        server.wait_engine_started()
        server.process.send_signal(number)
        assert server.exit_status(10) == 0, server.log()
        server.assert_nothing_left(2)
        assert "Traceback" not in server.log()


def test_a_hangup_is_ignored_where_nohup_says_so(tiny_llama):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Inherited by what is started.
    try:
        server = ServerProcess(tiny_llama)
    finally:
        signal.signal(signal.SIGHUP, previous)
    with server:
        server.wait_ready()
        server.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert server.health() == 200


def test_a_taken_port_ends_the_start_at_once_and_names_the_port(tiny_llama):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ServerProcess(tiny_llama, port=port) as server:
            assert server.exit_status() == 1
            assert f"port {port} on 127.0.0.1 is in use" in server.log()
            assert "Traceback" not in server.log()
            assert "engine core" not in server.log()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chat-template", "no-such-file.jinja"], "no-such-file.jinja"),
        (["--chat-template", "{{ broken"], "not valid jinja"),
        (["--api-key", ""], "--api-key is an empty text"),
        (["--served-model-name", "good", ""], "--served-model-name is an empty text"),
        (["--fingerprint-mode", "custom"], "--fingerprint-mode custom needs a text"),
    ],
)
def test_a_flag_of_the_http_server_that_cannot_work_ends_the_start_before_the_load(tiny_llama, flags, said):
    with ServerProcess(tiny_llama, *flags) as server:
        assert server.exit_status() in (1, 2)
        assert said in server.log()
        assert "Traceback" not in server.log()
        assert "engine core" not in server.log()


def test_two_servers_at_once_and_one_socket_file(tiny_llama, tmp_path):
    path = server_socket(tmp_path)
    with ServerProcess(tiny_llama) as one, ServerProcess(tiny_llama, "--uds", path) as two:
        one.wait_ready()
        assert one.complete().status_code == 200
        # Only the engine core loads it: the front end has answered a request without.
        assert not _loads_torch(one.process.pid)
        assert _loads_torch(one.engine_core)
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://server", timeout=60) as client:
            assert wait_until(lambda: os.path.exists(path))
            assert client.get("/health").status_code == 200
        two.process.send_signal(signal.SIGTERM)
        assert two.exit_status() == 0
        assert not os.path.exists(path)
        assert one.health() == 200


def _accepts(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _loads_torch(pid):
    return any("libtorch" in memory.path for memory in psutil.Process(pid).memory_maps())


def server_socket(tmp_path):
    return f"/tmp/hpt-{os.getpid()}-{free_port()}.sock"


def test_a_model_that_cannot_be_loaded_is_one_clear_error(tiny_llama, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with ServerProcess(broken) as server:
        assert server.exit_status() == 1
        log = server.log()
        assert "model.safetensors" in log
        assert log.count("hardpoint: error:") == 1
        assert "Traceback" not in log
        server.assert_nothing_left(2)


def test_an_engine_core_that_dies_while_it_loads_is_reported(tiny_llama):
    with ServerProcess(tiny_llama) as server:
        server.wait_engine_started()
        os.kill(server.engine_core, signal.SIGKILL)
        assert server.exit_status(10) == 1
        assert "was killed by SIGKILL before it was ready" in server.log()
        server.assert_nothing_left(2)


def test_worker_methods_over_http_answer_with_json_whatever_happens(tiny_llama):
    extension = f"{Extension.__module__}.{Extension.__qualname__}"
    path = {"PYTHONPATH": os.path.dirname(__file__), "VLLM_SERVER_DEV_MODE": "1"}
    with ServerProcess(tiny_llama, "--worker-extension-cls", extension, env=path) as server:
        server.wait_ready()

        def call(method, **more):
            return server.http.post("/collective_rpc", json={"method": method, **more})

        assert call("ok", kwargs={"value": 4}).json()["results"][0]["value"] == 4
        events = server.stream(300)
        next(events)
        started = time.monotonic()
        for method, limit, statuses in (
            ("boom", 30, {500}),
            ("weird", 30, {400, 500}),
            ("no_such_method", 30, {400, 404, 501}),
            ("slow", 1, {408, 500, 504}),
            (5, 30, {400, 422}),
        ):
            answer = call(method, timeout=limit)
            assert answer.status_code in statuses, (method, answer.status_code, answer.text)
            assert answer.json()["error"]["message"], method
        assert time.monotonic() - started < 40
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert call("ok").status_code == 200
        assert server.health() == 200


def test_an_abandoned_stream_frees_the_engine(tiny_llama):
    with ServerProcess(tiny_llama, "--max-num-seqs", "1") as server:
        server.wait_ready()
        # One after the other: long enough for their end to be ours.
        events = server.stream(n=8)
        next(events)
        events.close()
        assert server.complete(max_tokens=2).status_code == 200
        aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} '
        [count] = [
            line.removeprefix(aborted) for line in server.http.get("/metrics").text.splitlines() if aborted in line
        ]
        assert float(count) >= 1
        assert ended(server.process.pid, 0) is False
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(server.complete().status_code)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [200] * 8
        assert psutil.Process(server.engine_core).is_running()
