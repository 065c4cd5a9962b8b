"""`hardpoint bench startup`: processes that make an engine and generate one token, cold and warm.

Cold starts get an empty cache folder each (what is derived from the model's file is made anew; the file itself may lie
in the system's memory), warm ones share one that was used before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hardpoint.cli.bench.engine import add_engine_arguments, without_flags
from hardpoint.cli.bench.results import progress, save
from hardpoint.config.arguments import FlagError
from hardpoint.config.model_files import Hub, locate
from hardpoint.errors import HardpointError

REFUSED: dict[str, str] = {}
_COUNTS = ("--num-iters-cold", "--num-iters-warmup", "--num-iters-warm")
_OWN = (*_COUNTS, "--output-json", "--model")
_PERCENTILES = (10, 25, 50, 75, 90, 99)
# What a start is made of: key of the figures -> how the table names it.
_PARTS = {"startup_time": "to an engine that is ready", "first_token_time": "to the first token"}


class StartError(HardpointError):
    """A process that should have started did not."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags."""
    group = parser.add_argument_group("measurement")
    group.add_argument("--num-iters-cold", type=int, default=3, help="starts with empty caches (3)")
    group.add_argument("--num-iters-warmup", type=int, default=1, help="starts that fill the caches (1)")
    group.add_argument("--num-iters-warm", type=int, default=3, help="starts with filled caches (3)")
    group.add_argument("--output-json", metavar="FILE", help="write the result there")
    add_engine_arguments(parser, words)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, save."""
    if min(args.num_iters_cold, args.num_iters_warmup, args.num_iters_warm) < 0:
        raise FlagError("numbers of starts are at least 0", code="flag-value")
    # Fetched and named once, since a cold start's cache folder holds no model.
    words = ["--model", str(locate(args.model, Hub())), *without_flags(args.words, _OWN)]
    total = args.num_iters_cold + args.num_iters_warmup + args.num_iters_warm
    with progress(total, "starts") as step, tempfile.TemporaryDirectory(prefix="hardpoint-bench-") as folder:
        kept = Path(folder) / "kept"

        def starts(count: int, fresh: bool) -> list[dict[str, float]]:
            found = []
            for number in range(count):
                found.append(one_start(words, Path(folder) / str(number) if fresh else kept))
                step()
            return found

        cold = starts(args.num_iters_cold, True)
        starts(args.num_iters_warmup, False)
        warm = starts(args.num_iters_warm, False)
    figures = {**_figures("cold", cold), **_figures("warm", warm)}
    for kind, phase in (("cold", cold), ("warm", warm)):
        for part, meaning in _PARTS.items():
            if phase:
                print(f"{kind} start {meaning + ', s':<32}{figures[f'avg_{kind}_{part}']:>12.3f}")
    if args.output_json:
        save(Path(args.output_json), {"model_id": args.model, **figures})
    return 0


def one_start(words: Sequence[str], caches: Path) -> dict[str, float]:
    """Start one process with the engine's flags; seconds to each part. Raises StartError when it fails."""
    command = [sys.executable, "-m", "hardpoint.cli.bench.one_start", *words]
    env = {**os.environ, "HARDPOINT_CACHE": str(caches)}
    started = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise StartError(f"a start fails: {done.stderr.strip()[-2000:]}", code="bench-start")
    return {part: at - started for part, at in json.loads(lines[-1]).items()}


def _figures(kind: str, phase: Sequence[dict[str, float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for part in _PARTS if phase else ():
        taken = [one[part] for one in phase]
        figures[f"avg_{kind}_{part}"] = float(np.mean(taken))
        figures[f"{kind}_{part}s"] = taken
        figures[f"{kind}_{part}_percentiles"] = {str(one): float(np.percentile(taken, one)) for one in _PERCENTILES}
    return figures
