"""One real server on the tiny model for the whole suite, asked through the official client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import openai
from server_process import free_port

KEY = "the-key"


class Running:
    """`python -m hardpoint serve` in a process of its own."""

    def __init__(self, model: Path, *flags: str, env: dict[str, str] | None = None, key: str | None = KEY) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed with the server
        command = [sys.executable, "-m", "hardpoint", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *(["--api-key", key] if key else []), *flags]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "NO_PROXY": "*",
            **(env or {}),
        }
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> Running:
        ends = time.monotonic() + 200
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health").status_code == 200:
                    return self
            time.sleep(0.1)
        raise AssertionError(f"the server is not ready: {self.log()}")

    def client(self, **options: Any) -> openai.OpenAI:
        options.setdefault("api_key", self.key or "none")
        http = httpx.Client(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=120, http_client=http, **options)

    def metric(self, name: str, *parts: str) -> float:
        """Sum of a metric's samples whose labels contain all of `parts`."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name + "{") and all(part in line for part in parts)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def stop(self) -> int:
        """End the server, if it has not ended; return its exit status. May be called twice."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._log.close()


@pytest.fixture(scope="session")
def start_server(tiny_llama: Path) -> Iterator[Callable[..., Running]]:
    """Start further servers on the tiny model; they are stopped with the session."""
    started: list[Running] = []

    def start(*flags: str, **options: Any) -> Running:
        started.append(Running(tiny_llama, *flags, **options))
        return started[-1].wait_ready()

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Running]) -> Running:
    flags = ["--served-model-name", "tiny", "other", "--enable-prompt-tokens-details", "--enable-request-id-headers"]
    return start_server(*flags, "--enable-per-request-metrics", "--max-model-len", "256", "--max-num-queued-reqs", "40")


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def eventually() -> Callable[..., None]:
    return wait_until
