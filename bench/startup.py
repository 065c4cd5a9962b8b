"""Time a start: `hardpoint --help` in CPU seconds, and `hardpoint serve` to the first streamed token.

    python bench/startup.py [--runs 5] [--model smollm2-135m-instruct] [--json out.json]

Importing torch alone is timed in the same run, turn about, since it is the floor of any server that uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WATCHDOG_S = 120.0


def free_port() -> int:
    """A port nobody listens on now."""
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def first_token_s(model: str) -> float:
    """Seconds from starting the process to the first streamed chunk with text."""
    port = free_port()
    started = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "hardpoint", "serve", model, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while time.perf_counter() - started < WATCHDOG_S:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if stream_one_token(port):
                    return time.perf_counter() - started
            time.sleep(0.02)
        raise SystemExit(f"no token within {WATCHDOG_S:.0f} s")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def stream_one_token(port: int) -> bool:
    """Ask for one token; True once a chunk with text has arrived."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WATCHDOG_S)
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "stream": True})
    link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = link.getresponse()
    if answer.status != 200:
        return False
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            link.close()
            return True
    return False


def child_cpu_s(*command: str) -> float:
    """CPU seconds (user + system) of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def wall_s(*command: str) -> float:
    """Wall seconds of one command."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Measure turn about and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases: dict[str, Callable[[], float]] = {
        "hardpoint --help, CPU s": lambda: child_cpu_s("-m", "hardpoint", "--help"),
        "hardpoint --version, CPU s": lambda: child_cpu_s("-m", "hardpoint", "--version"),
        "import torch, wall s": lambda: wall_s("-c", "import torch"),
        "serve to first token, wall s": lambda: first_token_s(args.model),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for run in range(args.runs + 1):
        for name, measure in cases.items():
            seconds = measure()
            if run:  # the first round warms the file cache
                taken[name].append(seconds)
    width = max(map(len, taken))
    for name, seconds_list in taken.items():
        low, high = min(seconds_list), max(seconds_list)
        print(f"{name:<{width}}  median {statistics.median(seconds_list):6.2f}   min {low:6.2f}   max {high:6.2f}")
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "seconds": taken}, indent=1))


if __name__ == "__main__":
    main()
