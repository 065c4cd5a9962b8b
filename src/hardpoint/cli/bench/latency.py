"""`hardpoint bench latency`: one batch, generated again and again by an engine of its own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hardpoint.cli.bench.engine import NO_BEAMS, NO_PROFILER, add_engine_arguments, engine_of, random_prompts
from hardpoint.cli.bench.figures import shown
from hardpoint.cli.bench.results import progress, save
from hardpoint.config.arguments import FlagError
from hardpoint.types.sampling_params import SamplingParams

REFUSED = {"--use-beam-search": NO_BEAMS, "--profile": NO_PROFILER}
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags."""
    group = parser.add_argument_group("measurement")
    group.add_argument("--input-len", type=int, default=32, help="tokens of a prompt (32)")
    group.add_argument("--output-len", type=int, default=128, help="tokens of an answer (128)")
    group.add_argument("--batch-size", type=int, default=8, help="prompts at once (8)")
    group.add_argument("--n", type=int, default=1, help="answers of each prompt (1)")
    group.add_argument("--num-iters-warmup", type=int, default=10, help="batches before those that count (10)")
    group.add_argument("--num-iters", type=int, default=30, help="batches that count (30)")
    group.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")
    group.add_argument("--output-json", metavar="FILE", help="write the result there")
    add_engine_arguments(parser, words)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, save."""
    if min(args.input_len, args.output_len, args.batch_size, args.n, args.num_iters) < 1:
        raise FlagError("lengths, sizes and --num-iters are at least 1", code="flag-value")
    llm = engine_of(args)
    params = SamplingParams(
        n=args.n, ignore_eos=True, max_tokens=args.output_len, detokenize=not args.disable_detokenize
    )
    prompts = random_prompts(llm, args.batch_size, args.input_len)

    def batch_s() -> float:
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    with progress(args.num_iters_warmup + args.num_iters, "batches") as step:
        taken = []
        for number in range(args.num_iters_warmup + args.num_iters):
            seconds = batch_s()
            taken += [seconds] if number >= args.num_iters_warmup else []
            step()
    percentiles = {str(one): float(np.percentile(taken, one)) for one in _PERCENTILES}
    average = float(np.mean(taken))
    tokens = args.batch_size * args.n * args.output_len
    print(f"{'mean latency, s':<32}{average:>12.4f}")
    for name, value in percentiles.items():
        print(f"{'  percentile ' + name:<32}{value:>12.4f}")
    print(f"{'output tokens per second':<32}{shown(tokens / average):>12}")
    if args.output_json:
        facts = {name: getattr(args, name) for name in ("input_len", "output_len", "batch_size", "n")}
        result = {"model_id": args.model, **facts, "avg_latency": average, "latencies": taken}
        save(Path(args.output_json), {**result, "percentiles": percentiles})
    return 0
