"""`hardpoint bench throughput`: many prompts at once through an engine of its own, without a server."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardpoint.cli.bench import datasets
from hardpoint.cli.bench.engine import add_engine_arguments, engine_of
from hardpoint.cli.bench.figures import shown
from hardpoint.cli.bench.results import bar_on_a_terminal, save
from hardpoint.cli.bench.traffic import Ask
from hardpoint.config.arguments import FlagError
from hardpoint.types.sampling_params import SamplingParams

_NOT_BUILT = "it is not built"
REFUSED = {
    "--async-engine": "measure a server with `hardpoint bench serve`",
    "--prequeue-requests": "all requests are queued first anyway",
    "--hf-max-batch-size": "no other engine is measured here",
    "--hf-enable-torch-compile": "no other engine is measured here",
    "--hf-name": "fetch the dataset yourself and name its file with --dataset-path",
    "--hf-subset": "fetch the dataset yourself and name its file with --dataset-path",
    "--hf-split": "fetch the dataset yourself and name its file with --dataset-path",
    "--lora-path": _NOT_BUILT,
    "--lora-assignment": _NOT_BUILT,
    "--profile": "the engine has no profiler",
    "--enable-multimodal-chat": "only generated text is measured",
}


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags."""
    add_engine_arguments(parser, words)
    # The engine's own --seed serves the dataset too.
    parser.set_defaults(seed=0, tokenizer=None, skip_tokenizer_init=False)
    _add_measurement(parser)
    datasets.add_arguments(parser, num_prompts=1000, seed=False)


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--backend", choices=["vllm"], default="vllm", help="this engine, under vLLM's name for its own")
    group.add_argument("--n", type=int, default=1, help="answers of each prompt (1)")
    group.add_argument("--num-warmups", type=int, default=0, help="prompts before those that count (0)")
    group.add_argument("--disable-detokenize", action="store_true", help="make no text of the tokens")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--output-json", metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, save."""
    if args.n < 1 or args.num_warmups < 0:
        raise FlagError("--n is at least 1 and --num-warmups at least 0", code="flag-value")
    llm = engine_of(args)
    asks = datasets.asks(
        args, None if args.skip_tokenizer_init else datasets.tokenizer_of(args.tokenizer or args.model)
    )
    warm = [asks[number % len(asks)] for number in range(args.num_warmups)]
    if warm:
        _generate(llm, warm, args, quiet=True)
    started = time.perf_counter()
    outputs = _generate(llm, asks, args, quiet=args.disable_tqdm)
    seconds = time.perf_counter() - started
    inputs = sum(len(output.prompt_token_ids or ()) for output in outputs)
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    figures = {
        "elapsed_time": seconds,
        "num_requests": len(asks),
        "total_num_tokens": inputs + generated,
        "requests_per_second": len(asks) / seconds,
        "tokens_per_second": (inputs + generated) / seconds,
        "output_tokens_per_second": generated / seconds,
    }
    for name, value in figures.items():
        print(f"{name.replace('_', ' '):<32}{shown(value):>12}")
    if args.output_json:
        save(Path(args.output_json), {"model_id": args.model, **figures})
    return 0


def _generate(llm: Any, asks: Sequence[Ask], args: argparse.Namespace, quiet: bool) -> list[Any]:
    params = [
        SamplingParams(n=args.n, ignore_eos=True, max_tokens=ask.output_tokens, detokenize=not args.disable_detokenize)
        for ask in asks
    ]
    bar = False if quiet else bar_on_a_terminal
    return llm.generate([ask.prompt for ask in asks], params, use_tqdm=bar)
