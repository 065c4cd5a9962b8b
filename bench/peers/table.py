"""Measure Hardpoint and its peers on the same files, turn about, and write the table.

    python bench/peers/table.py [--folder DIR] [--out results.json] [--quick] [--only WORD ...] [--pairs 5]
                                [--threads 2] [--vllm] [--transformers] [--again] [--write docs/performance.md]

Both servers of a row are up and idle except for the one whose turn it is; who goes first alternates from pair to pair.
Prompts are random token ids, the same for both within a pair and never used twice; caches of prompts are off on both
sides. A row's ratio is the median of its pairs' ratios (above 1: Hardpoint is faster). Each row is saved as soon as it
is measured, and a row that is saved is not measured again without --again, so an interrupted run goes on where it was.
`others` is the share of the machine that processes outside the measurement used: above a few percent, repeat the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import report
import servers
from install import DEFAULT_FOLDER
from models import checkpoint, model_file
from servers import Plan, Server, Shape, busy_neighbour

from hardpoint.cli.bench.http_stream import Endpoint
from hardpoint.cli.bench.traffic import BACKENDS, Answer, Ask, Outcome, Pace, Target, send

SPLIT = Shape(16, 1024)
OURS = "hardpoint"


@dataclass(frozen=True)
class Load:
    """What is asked at a time, and the figure that is taken from the answers.

    shape  what llama.cpp's server is started for; each load gets the one that suits it best
    """

    name: str
    streams: int
    inputs: int
    outputs: int
    shape: Shape
    figure: Callable[[Outcome], float]


def decode_rate(outcome: Outcome) -> float:
    """Tokens per second after the first."""
    return statistics.median(1 / one.per_token for one in outcome.answers if one.per_token)


def prefill_rate(outcome: Outcome) -> float:
    """Prompt tokens per second until the first token."""
    return statistics.median(one.input_tokens / one.first for one in outcome.answers if one.first)


def output_rate(outcome: Outcome) -> float:
    """Output tokens per second of all streams together."""
    return sum(one.output_tokens for one in outcome.answers) / outcome.seconds


LOADS = (
    Load("decode, 1 stream", 1, 32, 96, Shape(1, 4096), decode_rate),
    Load("decode, 1 stream at 2,000 tokens", 1, 2000, 48, Shape(1, 4096), decode_rate),
    Load("prefill of 500 tokens", 1, 500, 1, Shape(1, 4096), prefill_rate),
    Load("8 streams, 64 in / 64 out", 8, 64, 64, Shape(8, 1024), output_rate),
    Load("16 streams, 128 in / 64 out", 16, 128, 64, SPLIT, output_rate),
)
BY_NAME = {load.name: load for load in LOADS}
# The same answers also tell how fast the long prompt was read.
LONG = "decode, 1 stream at 2,000 tokens"
LONG_PREFILL = "prefill of 2,000 tokens"
# Short, since a server may get slower by a large factor.
NEIGHBOUR_LOADS = (
    Load("decode, 1 stream", 1, 16, 12, Shape(1, 4096), decode_rate),
    Load("8 streams, 16 in / 12 out", 8, 16, 12, Shape(8, 1024), output_rate),
)
NEIGHBOUR_ROUNDS = 3


class Bench:
    """The run: its options, its prompts, and what has been measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.folder
        self.out: Path = options.out
        kept = json.loads(self.out.read_text()) if self.out.exists() else {}
        self.rows: dict[str, Any] = kept.get("rows", {})
        self.seconds: dict[str, float] = kept.get("seconds", {})
        self._prompts = random.Random(time.time_ns())

    def wants(self, key: str) -> bool:
        """Whether a row is asked for and not measured yet."""
        chosen = not self.options.only or any(word in key for word in self.options.only)
        return chosen and (self.options.again or key not in self.rows)

    def keep(self, key: str, row: dict[str, Any], started: float) -> None:
        """Save a row and say it."""
        self.rows[key] = row
        self.seconds[key] = time.perf_counter() - started
        content = {"machine": machine(), "options": self._options(), "rows": self.rows, "seconds": self.seconds}
        work = self.out.with_suffix(".part")
        work.parent.mkdir(parents=True, exist_ok=True)
        work.write_text(json.dumps(content, indent=1))
        work.replace(self.out)
        print(f"{key:<60}{report.brief(row)}  [{self.seconds[key]:.0f} s]", flush=True)

    def _options(self) -> dict[str, Any]:
        return {"pairs": self.options.pairs, "threads": self.options.threads, "at": time.strftime("%Y-%m-%d %H:%M")}

    def prompt(self, length: int) -> list[int]:
        """Token ids nobody has asked before; none of the special ones."""
        return [self._prompts.randrange(100, 49000) for _ in range(length)]

    def asks(self, load: Load) -> list[Ask]:
        """A load's requests."""
        return [Ask(self.prompt(load.inputs), load.inputs, load.outputs) for _ in range(load.streams)]

    def ours(self, file: Path, shape: Shape = SPLIT) -> Server:
        """Start Hardpoint on a file."""
        plan = servers.hardpoint(file, shape, self.options.threads, self.options.hardpoint_flags.split())
        return Server(plan, self.folder / "logs" / "hardpoint.log")

    def llama(self, file: Path, shape: Shape) -> Server:
        """Start llama.cpp on a file."""
        plan = servers.llama(self.folder, file, shape, self.options.threads, self.options.llama_flags.split())
        return Server(plan, self.folder / "logs" / "llama.log")


@dataclass
class Turn:
    """One server's turn at a load."""

    outcome: Outcome
    others: float


def turn(server: Server, asks: Sequence[Ask], idle: Sequence[Server] = ()) -> Turn:
    """Send the requests to one server and read how busy everything else was. Raises RuntimeError if one fails."""
    fields = {"model": model_name(server), "temperature": 0, "ignore_eos": True, **server.plan.body}
    target = Target(Endpoint.of(f"http://127.0.0.1:{server.port}"), BACKENDS["openai"], "/v1/completions", fields)
    before, busy, started = _own_cpu(server), _busy_cpu(), time.perf_counter()
    outcome = asyncio.run(send(target, asks, Pace()))
    taken = time.perf_counter() - started
    foreign = (_busy_cpu() - busy) - (_own_cpu(server) - before)
    for answer, ask in zip(outcome.answers, asks, strict=True):
        _check(server, answer, ask)
    return Turn(outcome, max(0.0, foreign / (taken * (os.cpu_count() or 1))))


def model_name(server: Server) -> str:
    """What the server calls its model; asked once."""
    if not hasattr(server, "model_name"):
        endpoint = Endpoint.of(f"http://127.0.0.1:{server.port}")
        try:
            server.model_name = asyncio.run(endpoint.get("/v1/models"))["data"][0]["id"]  # type: ignore[attr-defined]
        except Exception:
            server.model_name = "model"  # type: ignore[attr-defined]
    return str(server.model_name)  # type: ignore[attr-defined]


def _check(server: Server, answer: Answer, ask: Ask) -> None:
    if answer.error:
        raise RuntimeError(f"{server.plan.name} fails: {answer.error}")
    if answer.output_tokens != ask.output_tokens or answer.input_tokens not in (ask.input_tokens, ask.input_tokens + 1):
        got = f"{answer.input_tokens} in / {answer.output_tokens} out"
        raise RuntimeError(f"{server.plan.name} counts {got}, not {ask.input_tokens} / {ask.output_tokens}")


def _own_cpu(server: Server) -> float:
    mine = os.times()
    return server.cpu_s() + mine.user + mine.system


def _busy_cpu() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


# -- rows --------------------------------------------------------------------------------------------


def turns_of(bench: Bench, load: Load, first: Server, second: Server) -> list[dict[str, Turn]]:
    """Give two servers a load turn about, after a short one each that does not count."""
    short = replace(load, inputs=min(load.inputs, 64), outputs=min(load.outputs, 8))
    for server in (first, second):
        turn(server, bench.asks(short))
    taken: list[dict[str, Turn]] = []
    for number in range(bench.options.pairs):
        asks = bench.asks(load)
        order = (first, second) if number % 2 == 0 else (second, first)
        taken.append({server.plan.name: turn(server, asks) for server in order})
    return taken


def row_of(figure: Callable[[Outcome], float], taken: Sequence[dict[str, Turn]], theirs: str) -> dict[str, Any]:
    """The medians, the median of the pairs' ratios and its spread."""
    pairs = [(figure(one[OURS].outcome), figure(one[theirs].outcome)) for one in taken]
    ratios = [mine / other for mine, other in pairs]
    return {
        "unit": "tokens/s",
        "ours": statistics.median(mine for mine, _ in pairs),
        "theirs": statistics.median(other for _, other in pairs),
        "peer": theirs,
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "pairs": pairs,
        "others": statistics.median(one.others for pair in taken for one in pair.values()),
    }


def measure_file(bench: Bench, name: str) -> None:
    """Every load on one file against llama.cpp."""
    wanted = [load for load in LOADS if bench.wants(f"{name}/{load.name}")]
    if not wanted:
        return
    file = model_file(bench.folder, name)
    with bench.ours(file) as ours:
        ours.wait_ready()
        for shape, loads in itertools.groupby(wanted, key=lambda load: load.shape):
            with bench.llama(file, shape) as llama:
                llama.wait_ready()
                for load in loads:
                    _measure_load(bench, name, load, ours, llama)
                if shape == SPLIT and name == "smollm2-q4_1":
                    started = time.perf_counter()
                    bench.keep("memory", {"ours": ours.memory_mb(), "theirs": llama.memory_mb()}, started)


def _measure_load(bench: Bench, name: str, load: Load, ours: Server, llama: Server) -> None:
    started = time.perf_counter()
    taken = turns_of(bench, load, ours, llama)
    bench.keep(f"{name}/{load.name}", row_of(load.figure, taken, llama.plan.name), started)
    if load.name == LONG:
        bench.keep(f"{name}/{LONG_PREFILL}", row_of(prefill_rate, taken, llama.plan.name), time.perf_counter())


def measure_peer(bench: Bench, peer: str, plan: Plan, names: Sequence[str]) -> None:
    """Some loads against another peer, on the default model."""
    wanted = [BY_NAME[name] for name in names if bench.wants(f"{peer}/{name}")]
    if not wanted:
        return
    file = model_file(bench.folder, "smollm2-q4_1")
    with bench.ours(file) as ours, Server(plan, bench.folder / "logs" / f"{peer}.log") as other:
        ours.wait_ready()
        other.wait_ready()
        ready = time.perf_counter() - other.started
        for load in wanted:
            started = time.perf_counter()
            row = row_of(load.figure, turns_of(bench, load, ours, other), plan.name)
            bench.keep(f"{peer}/{load.name}", {**row, "peer_ready_s": ready}, started)


def measure_start(bench: Bench) -> None:
    """Start to the first token of both, and importing torch alone, turn about."""
    if not bench.wants("start to first token"):
        return
    started = time.perf_counter()
    file = model_file(bench.folder, "smollm2-q4_1")
    ways: dict[str, Callable[[], float]] = {
        "import torch": import_torch_s,
        "hardpoint": lambda: first_token_s(bench, bench.ours(file)),
        "llama.cpp": lambda: first_token_s(bench, bench.llama(file, SPLIT)),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(bench.options.pairs + 1):
        for name, measure in ways.items():
            seconds = measure()
            if number:  # the first round warms the file cache
                taken[name].append(seconds)
    over = [mine - floor for mine, floor in zip(taken["hardpoint"], taken["import torch"], strict=True)]
    bench.keep("start to first token", {"seconds": taken, "over_import_torch_s": statistics.median(over)}, started)


def import_torch_s() -> float:
    """Seconds that a process takes which only imports torch."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def first_token_s(bench: Bench, server: Server) -> float:
    """Seconds from starting a server to its first token; ends it."""
    target = Target(
        Endpoint.of(f"http://127.0.0.1:{server.port}"),
        BACKENDS["openai"],
        "/v1/completions",
        {"model": str(server.plan.command[4] if server.plan.name == "hardpoint" else "m"), **server.plan.body},
    )
    with server:
        while time.perf_counter() - server.started < servers.READY_S:
            if server.process.poll() is not None:
                raise RuntimeError(f"{server.plan.name} ends with {server.process.returncode}: {server.log}")
            begun = time.perf_counter()
            answer = asyncio.run(target.ask(Ask(bench.prompt(8), 8, 1)))
            if not answer.error and answer.first is not None:
                return begun + answer.first - server.started
            time.sleep(0.02)
    raise RuntimeError(f"{server.plan.name} sends no token")


def measure_neighbour(bench: Bench) -> None:
    """How much slower each gets when another process takes one core for itself."""
    wanted = [load for load in NEIGHBOUR_LOADS if bench.wants(f"busy neighbour/{load.name}")]
    if not wanted:
        return
    file = model_file(bench.folder, "smollm2-q4_1")
    with bench.ours(file) as ours:
        ours.wait_ready()
        for load in wanted:
            started = time.perf_counter()
            with bench.llama(file, load.shape) as llama:
                both = [ours, llama.wait_ready()]
                slower = _slower(bench, load, both)
            row = {name: statistics.median(found) for name, found in slower.items()}
            bench.keep(f"busy neighbour/{load.name}", {"slower": row, "rounds": slower}, started)


def _slower(bench: Bench, load: Load, both: Sequence[Server]) -> dict[str, list[float]]:
    slower: dict[str, list[float]] = {server.plan.name: [] for server in both}
    for server in both:
        turn(server, bench.asks(load))
    for number in range(NEIGHBOUR_ROUNDS):
        for server in both:
            alone = load.figure(turn(server, bench.asks(load)).outcome)
            with busy_neighbour(number % (os.cpu_count() or 1)):
                beside = load.figure(turn(server, bench.asks(load)).outcome)
            slower[server.plan.name].append(alone / beside)
    return slower


# -- the run -----------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags")).split()
        sets = [one for one in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if one in flags]
        name += f" ({', '.join(sets)})"
    memory = psutil.virtual_memory().total / 1e9
    return {"processor": name, "cores": os.cpu_count(), "memory_gb": round(memory), "system": platform.platform()}


def stages(bench: Bench) -> Iterator[Callable[[], None]]:
    """What is measured, the most important first."""
    options = bench.options
    files = ["smollm2-q4_1", "wide-q4_k_m", "smollm2-q8_0", "wide-q8_0", "smollm2-q4_0", "wide-q4_0"]
    if options.quick:
        files = ["smollm2-q4_1", "wide-q4_k_m"]
    yield lambda: measure_file(bench, files[0])
    yield lambda: measure_start(bench)
    for name in files[1:]:
        yield lambda name=name: measure_file(bench, name)  # type: ignore[misc]
    yield lambda: measure_neighbour(bench)
    if options.vllm:
        names = ["16 streams, 128 in / 64 out", "8 streams, 64 in / 64 out", "decode, 1 stream"]
        yield lambda: measure_peer(bench, "vllm", vllm_plan(bench), names)
    if options.transformers:
        alone = ["decode, 1 stream", "prefill of 500 tokens"]
        yield lambda: measure_peer(
            bench, "transformers", servers.transformers(checkpoint(bench.folder), options.threads), alone
        )


def vllm_plan(bench: Bench) -> Plan:
    """vLLM for the shape of the split loads."""
    flags = bench.options.vllm_flags.split()
    return servers.vllm(bench.folder, checkpoint(bench.folder), SPLIT, bench.options.threads, flags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where install.py put the peers")
    parser.add_argument("--out", type=Path, help="JSON; default results.json in the folder")
    parser.add_argument("--pairs", type=int, help="pairs of each row (5; with --quick 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="two files, three pairs")
    parser.add_argument("--only", nargs="+", default=[], help="only rows whose name holds one of these words")
    parser.add_argument("--again", action="store_true", help="measure rows again that are saved")
    parser.add_argument("--vllm", action="store_true", help="vLLM's CPU build, too")
    parser.add_argument("--transformers", action="store_true", help="transformers, too")
    parser.add_argument("--hardpoint-flags", default="")
    parser.add_argument("--llama-flags", default="")
    parser.add_argument("--vllm-flags", default="")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    parser.add_argument("--report-only", action="store_true", help="measure nothing, write the table of what is saved")
    options = parser.parse_args()
    options.pairs = options.pairs or (3 if options.quick else 5)
    servers.give_priority(os.getpid())
    options.out = options.out or options.folder / "results.json"
    bench = Bench(options)
    started = time.perf_counter()
    failed = []
    for stage in [] if options.report_only else stages(bench):
        try:
            stage()
        except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as problem:
            # One server that fails must not take the other rows with it.
            print(f"FAILED: {problem}", file=sys.stderr, flush=True)
            failed.append(str(problem))
    print(f"{time.perf_counter() - started:.0f} s in all; rows are in {options.out}")
    text = report.markdown(json.loads(options.out.read_text()))
    options.out.with_suffix(".md").write_text(text)
    if options.write:
        report.put(options.write, text)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
