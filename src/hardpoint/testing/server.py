"""A real server in a process of its own, for tests that want to see a plugin at work."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hardpoint.testing.plugins import Plugin, plugin_environment

_START_S, _STOP_S, _ANSWER_S = 180.0, 20.0, 60.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Answer(NamedTuple):
    """What the server said: the status, and the body as JSON where it is that, else as text."""

    status: int
    body: Any


class RunningServer:
    """`hardpoint serve` on a free port of this machine; ready when the constructor returns.

    model        what to serve: best `tiny_model()`        flags  more words of the command line
    plugins      found by the server beside what is installed
    environment  more variables
    Raises RuntimeError with the server's log when it does not start.
    """

    def __init__(
        self,
        model: Path | str,
        flags: Iterable[str] = (),
        plugins: Iterable[Plugin] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._folder = Path(tempfile.mkdtemp(prefix="hardpoint-server-"))
        variables = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **(environment or {})}
        command = [sys.executable, "-m", "hardpoint", "serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", self.url.rpartition(":")[2], *flags]
        with open(self._folder / "log", "w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command, env=plugin_environment(plugins, **variables), stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                if self.get("/health").status == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """What it and its processes have written so far."""
        path = self._folder / "log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Ask for a path such as `/plugins`."""
        return self._ask(urllib.request.Request(self.url + path, headers=dict(headers or {})))

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Send JSON."""
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        return self._ask(urllib.request.Request(self.url + path, json.dumps(body).encode(), all_headers))

    def complete(self, prompt: str | list[int], max_tokens: int = 8, **more: Any) -> Any:
        """The answer to a greedy completion; RuntimeError with the server's words for a refusal."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        answer = self.post("/v1/completions", body)
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.body}")
        return answer.body

    def ledger(self, **wanted: str) -> list[dict[str, Any]]:
        """What happened to extensions in all processes, narrowed by fields such as `kind="register"`."""
        entries = self.get("/plugins").body["ledger"]
        return [entry for entry in entries if all(entry[name] == value for name, value in wanted.items())]

    def _ask(self, request: urllib.request.Request) -> Answer:
        try:
            with _direct.open(request, timeout=_ANSWER_S) as response:
                return Answer(response.status, _read(response.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _read(error.read()))

    def stop(self) -> int:
        """End it politely, by force if need be; the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        status = self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return status

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _read(data: bytes) -> Any:
    text = data.decode(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
