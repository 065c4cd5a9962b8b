"""Servers that are measured: how each is started, what its processes use, and how it ends with this process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from install import llama_tool, vllm_python

READY_S = 600.0
_STOP_S = 20.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_running: list[Server] = []


@dataclass(frozen=True)
class Shape:
    """What a server must hold: so many requests at once, of so many tokens each."""

    streams: int
    tokens: int


@dataclass
class Plan:
    """How to start a server.

    body  what its requests carry beside the prompt
    """

    name: str
    command: Sequence[str | Path]
    env: dict[str, str] = field(default_factory=dict)
    body: dict[str, object] = field(default_factory=dict)


def hardpoint(model: Path, shape: Shape, threads: int, extra: Sequence[str] = ()) -> Plan:
    """This repository's server with a KV cache of exactly the shape's tokens."""
    blocks = shape.streams * -(-shape.tokens // 16)
    words = ["serve", model, "--host", "127.0.0.1", "--max-num-seqs", str(shape.streams)]
    words += ["--max-model-len", str(min(shape.tokens * shape.streams, 4096)), "--num-gpu-blocks-override", str(blocks)]
    words += ["--no-enable-prefix-caching", *extra]
    env = {"OMP_NUM_THREADS": str(threads)}
    return Plan("hardpoint", [sys.executable, "-m", "hardpoint", *words, "--port"], env)


def llama(folder: Path, model: Path, shape: Shape, threads: int, extra: Sequence[str] = ()) -> Plan:
    """llama.cpp's server: defaults, less the caches of prompts."""
    words = ["-m", model, "-t", str(threads), "-np", str(shape.streams), "-c", str(shape.streams * shape.tokens)]
    words += ["--cache-ram", "0", "--no-cache-prompt", "--no-slots", "--host", "127.0.0.1", *extra]
    return Plan("llama.cpp", [llama_tool(folder, "llama-server"), *words, "--port"], {}, {"cache_prompt": False})


def vllm(folder: Path, checkpoint: Path, shape: Shape, threads: int, extra: Sequence[str] = ()) -> Plan:
    """vLLM's CPU build in bfloat16."""
    words = ["-m", "vllm.entrypoints.cli.main", "serve", checkpoint, "--host", "127.0.0.1", "--dtype", "bfloat16"]
    words += ["--max-model-len", str(shape.tokens), "--max-num-seqs", str(shape.streams)]
    words += ["--no-enable-prefix-caching", *extra]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise one core is kept for the front end.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CACHE_ROOT": str(folder / "vllm" / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "",
    }
    return Plan("vllm", [vllm_python(folder), *words, "--port"], env)


def transformers(checkpoint: Path, threads: int) -> Plan:
    """transformers' `generate` behind the smallest server, one request at a time."""
    script = Path(__file__).with_name("transformers_server.py")
    return Plan("transformers", [sys.executable, script, checkpoint, "--threads", str(threads), "--port"])


class Server:
    """One started server.

    within_s  how long `wait_ready` waits
    """

    def __init__(self, plan: Plan, log: Path) -> None:
        self.plan = plan
        self.port = free_port()
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.perf_counter()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*map(str, plan.command), str(self.port)],
                env={**os.environ, **plan.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        _running.append(self)

    def wait_ready(self, within_s: float = READY_S) -> Server:
        """Wait until /health answers 200. Raises RuntimeError with the end of the log."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            if self._healthy():
                for process in self.processes():
                    give_priority(process.pid)
                return self
            time.sleep(0.1)
        tail = self.log.read_text(errors="replace")[-3000:]
        self.stop()
        raise RuntimeError(f"{self.plan.name} is not ready; {self.log} ends with:\n{tail}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def processes(self) -> list[psutil.Process]:
        """The server and everything below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """CPU seconds its processes have used."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_mb(self) -> dict[str, float]:
        """Megabytes of its processes: resident, proportional (shared pages split), and what torch's libraries take."""
        found = dict.fromkeys(("rss", "pss", "pss_torch", "rss_torch", "pss_model_file"), 0.0)
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.Error):
                for path, kind, megabytes in _mappings(process.pid):
                    found[kind] += megabytes
                    if "/torch/" in path or "/torch.libs/" in path:
                        found[f"{kind}_torch"] += megabytes
                    elif kind == "pss" and path.endswith((".gguf", ".safetensors")):
                        found["pss_model_file"] += megabytes
        return found

    def stop(self) -> None:
        """End it and everything below it."""
        if self in _running:
            _running.remove(self)
        below = self.processes()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(_STOP_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _mappings(pid: int) -> list[tuple[str, str, float]]:
    """The file of every mapping, `rss` or `pss`, and its megabytes."""
    found: list[tuple[str, str, float]] = []
    path = ""
    with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            words = line.split(maxsplit=5)
            if not words[0].endswith(":"):
                path = words[5].strip() if len(words) > 5 else ""
            elif words[0] in ("Pss:", "Rss:"):
                found.append((path, words[0][:3].lower(), float(words[1]) * 1024 / 1e6))
    return found


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def give_priority(pid: int) -> None:
    """Give a process's session this process's priority: Linux may schedule sessions as groups, and only these count."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(os.getpriority(os.PRIO_PROCESS, 0)))


def free_port() -> int:
    """A port nobody listens on now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def stop_all() -> None:
    """End whatever is still there."""
    for server in list(_running):
        server.stop()


def _told_to_end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


atexit.register(stop_all)
signal.signal(signal.SIGTERM, _told_to_end)


@contextlib.contextmanager
def busy_neighbour(core: int = 0):  # noqa: ANN201 - a context manager
    """Keep one core busy with a process that only counts."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    spinner = subprocess.Popen([sys.executable, "-S", "-c", code], preexec_fn=_end_with_parent)
    try:
        time.sleep(0.3)
        yield
    finally:
        spinner.kill()
        spinner.wait()
