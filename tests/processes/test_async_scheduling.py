"""A server that plans ahead answers as one that waits, and what it has made is not lost when it ends."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from process_tools import wait_until
from server_process import ServerProcess

pytestmark = pytest.mark.server

QUESTIONS = [
    {"max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 30, "temperature": 1, "seed": 4, "logprobs": 3},
    {"max_tokens": 30, "temperature": 1, "seed": 5, "n": 2},
    {"max_tokens": 40, "temperature": 1, "seed": 6, "stop": ["e", "a"], "ignore_eos": True},
    {"max_tokens": 30, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}},
    {"max_tokens": 5, "echo": True, "logprobs": 1},
    {"max_tokens": 25, "stop_token_ids": list(range(0, 300, 2)), "min_tokens": 3},
]

FAILING = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

class Failing(AsyncScheduler):
    planned = 0

    def schedule(self, *args, **kwargs):
        self.planned += bool(self.running or self.waiting)
        if self.planned == 9:
            raise RuntimeError("no plan today")
        return super().schedule(*args, **kwargs)
"""


@pytest.fixture(scope="module")
def ahead(tiny_llama):
    with ServerProcess(
        tiny_llama, "--async-scheduling", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"
    ) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def waiting(tiny_llama):
    with ServerProcess(tiny_llama, "--no-async-scheduling") as server:
        yield server.wait_ready()


def choices(server: ServerProcess) -> list[list[dict]]:
    """The answers to all questions, asked at the same time."""
    with ThreadPoolExecutor(len(QUESTIONS)) as threads:
        answers = list(
            threads.map(lambda item: server.complete(f"Question {item[0]}", **item[1]), enumerate(QUESTIONS))
        )
    assert [answer.status_code for answer in answers] == [200] * len(answers), [answer.text for answer in answers]
    return [answer.json()["choices"] for answer in answers]


def rounded(value):
    """The same with numbers that batches of another make may change in the last bits cut short."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def test_it_answers_as_a_server_that_waits(ahead, waiting):
    assert choices(ahead) == rounded(choices(waiting))


def test_an_id_whose_request_was_left_can_be_used_at_once(ahead):
    whole = ahead.complete("Once", max_tokens=12, ignore_eos=True).json()["choices"]
    for _ in range(3):
        stream = ahead.stream()
        next(stream)
        stream.close()
        answer = ahead.http.post(
            "/v1/completions", headers={"X-Request-Id": "mine"},
            json={"model": "m", "prompt": "Once", "max_tokens": 12, "ignore_eos": True, "temperature": 0},
        )  # fmt: skip
        assert answer.json()["choices"] == whole


def test_tokens_come_before_the_error_of_a_scheduler(tiny_llama, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    with ServerProcess(tiny_llama, "--scheduler-cls", "failing.Failing", env={"PYTHONPATH": str(tmp_path)}) as server:
        server.wait_ready()
        *events, last = server.stream(return_token_ids=True)
        assert "no plan today" in last["error"]["message"]
        assert sum(len(event["choices"][0]["token_ids"]) for event in events) == 8
        assert server.exit_status() == 1
        assert len(server.lines("ERROR", "no plan today")) == 1, server.log()


def test_the_end_of_an_engine_under_load_is_one_error_in_the_log(ahead):
    ended = []

    def read() -> None:
        ended.append(list(ahead.stream(n=2))[-1])

    threads = [threading.Thread(target=read) for _ in range(4)]
    engine_core = ahead.engine_core  # Found beforehand: looking may take longer than a stream does.
    for thread in threads:
        thread.start()
    running = 'vllm:num_requests_running{engine="0",model_name="m"} 8.0'
    assert wait_until(lambda: running in ahead.http.get("/metrics").text)
    os.kill(engine_core, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert ["was killed by SIGKILL" in event["error"]["message"] for event in ended] == [True] * 4
    assert ahead.exit_status() == 1
    assert len(ahead.lines("ERROR")) == 1, ahead.log()
