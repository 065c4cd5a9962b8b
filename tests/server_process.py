"""A real server in a process of its own, and everything it starts, found by a mark in the environment."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from process_tools import PATIENCE_S, running, wait_until

_MARK = "HARDPOINT_TEST_MARK"
# Below what the system gives to those who ask for any; others who count up like this begin elsewhere.
_FIRST_PORT = 15_000 + secrets.randbelow(10_000)
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 5_000))


class ServerProcess:
    """`python -m hardpoint serve MODEL`, on a free port unless told otherwise.

    program   what to run instead of `python -m hardpoint`
    headless  an engine without an HTTP server, at the address in `flags`
    """

    def __init__(
        self,
        model: Path,
        *flags: str,
        port: int | None = None,
        env: dict[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "hardpoint"),
        headless: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.mark = uuid.uuid4().hex
        # Short, and nothing else's: what is left here was left by this server.
        self.sockets = tempfile.mkdtemp(prefix="hpt-", dir="/tmp")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        environment = {
            **os.environ,
            **(env or {}),
            _MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_RPC_BASE_PATH": self.sockets,
            "NO_PROXY": "*",
        }
        http = ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "m"]
        command = [*program, "serve", str(model), *(["--headless"] if headless else http), *flags]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False)

    def wait_ready(self, within_s: float = 200.0) -> ServerProcess:
        ready = wait_until(lambda: self.health() == 200 or self.process.poll() is not None, within_s)
        assert ready, f"the server is not ready: {self.log()}"
        assert self.process.poll() is None, f"the server ended: {self.log()}"
        return self

    def health(self) -> int:
        """The status of /health; 0 when nobody answers."""
        try:
            return self.http.get("/health").status_code
        except httpx.HTTPError:
            return 0

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def lines(self, *parts: str) -> list[str]:
        """Log lines with all these parts, of the processes that stay: whether a model class is inspected or its
        inspection found in the cache depends on earlier runs."""
        return [
            line
            for line in self.log().splitlines()
            if all(part in line for part in parts) and "[inspector " not in line
        ]

    def ledger(self) -> list[dict]:
        """What /plugins says happened, in the processes that stay."""
        return [entry for entry in self.http.get("/plugins").json()["ledger"] if entry["role"] != "inspector"]

    def processes(self) -> list[psutil.Process]:
        """Everything that carries the mark, the server itself included."""
        return [process for process in psutil.process_iter() if _marked(process, self.mark)]

    def find(self, module: str) -> list[int]:
        """Pids of the processes that run `module`, oldest first."""
        found = []
        for process in sorted(self.processes(), key=lambda process: process.create_time()):
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline():
                    found.append(process.pid)
        return found

    @property
    def engine_core(self) -> int:
        [pid] = self.find("hardpoint.processes.engine_core")
        return pid

    def wait_engine_started(self) -> None:
        """Wait until there is an engine core process, ready or not."""
        assert wait_until(lambda: bool(self.find("hardpoint.processes.engine_core"))), self.log()

    def exit_status(self, within_s: float = PATIENCE_S) -> int:
        return self.process.wait(within_s)

    def assert_nothing_left(self, within_s: float = PATIENCE_S) -> None:
        """No process and no socket file of this server is there any more."""
        gone = wait_until(lambda: not self.processes(), within_s)
        assert gone, [(process.pid, process.cmdline()) for process in self.processes()]
        assert os.listdir(self.sockets) == []

    def stream(self, tokens: int = 900, **more: object) -> Iterator[dict]:
        """A streamed completion: each event's JSON; an error event too."""
        body = {"model": "m", "prompt": "The", "max_tokens": tokens, "ignore_eos": True, "stream": True, **more}
        with self.http.stream("POST", "/v1/completions", json={**body, "temperature": 0}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def complete(self, prompt: str = "The", **more: object) -> httpx.Response:
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        return self.http.post("/v1/completions", json=body)

    def close(self) -> None:
        """End whatever is still there."""
        self.http.close()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(PATIENCE_S)
        self._log.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def free_port() -> int:
    """One that the system gives to nobody of itself, so that it is still free when a server has started."""
    for port in _PORTS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is always a next one")


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return running(process.pid) and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False
