"""`hardpoint bench serve`: send requests to a running server with an OpenAI API and time the answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hardpoint.cli.bench import datasets
from hardpoint.cli.bench.figures import TIMES, details_of, figures_of, table
from hardpoint.cli.bench.http_stream import Endpoint, EndpointError
from hardpoint.cli.bench.results import progress, save
from hardpoint.cli.bench.traffic import BACKENDS, Ask, Outcome, Pace, Target, send
from hardpoint.config.arguments import FlagError, parse_object
from hardpoint.errors import HardpointError

_NOT_TEXT = "only generated text is measured"
_NOT_BUILT = "it is not built"
REFUSED = {
    "--use-beam-search": "a stream has no beams",
    "--logprobs": "put it into --extra-body",
    "--lora-modules": _NOT_BUILT,
    "--lora-assignment": _NOT_BUILT,
    "--profile": "the server has no profiler",
    "--self-timed": _NOT_BUILT,
    "--probe-request-rate": _NOT_BUILT,
    "--plot-timeline": _NOT_BUILT,
    "--timeline-itl-thresholds": _NOT_BUILT,
    "--plot-dataset-stats": _NOT_BUILT,
    "--ramp-up-strategy": _NOT_BUILT,
    "--ramp-up-start-rps": _NOT_BUILT,
    "--ramp-up-end-rps": _NOT_BUILT,
    "--trust-remote-code": "no code of a repository is run",
    "--enable-multimodal-chat": _NOT_TEXT,
    "--random-batch-size": _NOT_TEXT,
    "--no-reranker": _NOT_TEXT,
    "--hf-name": "fetch the dataset yourself and name its file with --dataset-path",
    "--hf-subset": "fetch the dataset yourself and name its file with --dataset-path",
    "--hf-split": "fetch the dataset yourself and name its file with --dataset-path",
}
_READY_POLL_S = 0.5
_SAMPLING = (
    ("--temperature", float),
    ("--top-p", float),
    ("--top-k", int),
    ("--min-p", float),
    ("--frequency-penalty", float),
    ("--presence-penalty", float),
    ("--repetition-penalty", float),
)


class BenchError(HardpointError):
    """The server cannot be measured."""


def add_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the flags."""
    _add_server(parser)
    datasets.add_arguments(parser, num_prompts=1000)
    _add_traffic(parser)
    _add_result(parser)
    group = parser.add_argument_group("sampling, as every request carries it")
    for flag, kind in _SAMPLING:
        group.add_argument(flag, type=kind)
    group.add_argument("--ignore-eos", action="store_true", help="go on to the asked length")
    group.add_argument("--extra-body", type=parse_object, metavar="JSON", help="more fields of the body")
    group.add_argument("--chat-template-kwargs", type=parse_object, metavar="JSON", help="for openai-chat")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=list(BACKENDS), default="openai", help="the API (default openai)")
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port, e.g. https://example.com")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--endpoint", help="the path (default: the backend's)")
    group.add_argument("--header", nargs="*", metavar="KEY=VALUE", help="headers of every request")
    group.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    group.add_argument("--model", help="the model (default: the server's first)")
    group.add_argument("--served-model-name", help="its name in requests, if that is another")
    group.add_argument("--tokenizer", help="a folder, .gguf file or name (default: the model's)")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="count tokens only as the server does")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0, help="wait so long for a first answer (0)")


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="per second (default: all at once)")
    group.add_argument("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less is burstier")
    group.add_argument("--max-concurrency", type=int, help="most requests at a time")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before those that count (0)")
    group.add_argument("--request-id-prefix", help="X-Request-Id of each request begins with this")


def _add_result(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl", help=f"of {','.join(TIMES)} (ttft,tpot,itl)")
    group.add_argument("--metric-percentiles", default="99", help="percentiles of these, e.g. 50,90,99 (99)")
    group.add_argument("--goodput", nargs="+", metavar="KEY:MS", help="goals, e.g. ttft:200 tpot:30")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="with every request in it")
    group.add_argument("--append-result", action="store_true", help="add a line to the file")
    group.add_argument("--result-dir", help="its folder (default: this one)")
    group.add_argument("--result-filename", help="its name (default: made of label, rate, model and time)")
    group.add_argument("--output-json", metavar="FILE", help="write the JSON there; the same as the three above")
    group.add_argument("--label", help="what the result is called (default: the backend)")
    group.add_argument("--metadata", nargs="*", metavar="KEY=VALUE", help="to keep with the result")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, save. 1 when every request failed."""
    metrics, percentiles, goals = _wanted(args)
    endpoint = _endpoint(args)
    if args.num_warmups < 0 or (args.max_concurrency is not None and args.max_concurrency < 1):
        raise FlagError("--num-warmups and --max-concurrency cannot be so small", code="flag-value")
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise FlagError("--request-rate and --burstiness are above 0", code="flag-value")
    try:
        model, outcome = asyncio.run(_measure(args, endpoint))
    except EndpointError as problem:
        raise BenchError(str(problem), code="no-server", fix="start it, or name it with --base-url") from None
    figures = figures_of(outcome, metrics, percentiles, goals)
    print(table(figures, metrics))
    for error in sorted({one.error for one in outcome.answers if one.error})[:3]:
        print(f"hardpoint bench: a request failed: {error}", file=sys.stderr)
    _save(args, model, {**figures, **(details_of(outcome) if args.save_detailed else {})})
    return 0 if figures["completed"] else 1


async def _measure(args: argparse.Namespace, endpoint: Endpoint) -> tuple[str, Outcome]:
    name, files = args.model, args.model
    if name is None:
        name, files = await _first_model(endpoint, args.ready_check_timeout_sec)
    name = args.served_model_name or name
    tokenizer = None if args.skip_tokenizer_init else datasets.tokenizer_of(args.tokenizer or files)
    asks = datasets.asks(args, tokenizer)
    backend = BACKENDS[args.backend]
    target = Target(endpoint, backend, args.endpoint or backend.endpoint, _fields(args, name))
    await _ready(target, asks[0], args.ready_check_timeout_sec)
    pace = Pace(args.request_rate, args.burstiness, args.max_concurrency, args.seed)
    warm = [asks[number % len(asks)] for number in range(args.num_warmups)]
    await send(target, warm, Pace(concurrency=args.max_concurrency))
    with progress(len(asks), "requests", args.disable_tqdm) as step:
        return files, await send(target, asks, pace, lambda answer: step())


async def _first_model(endpoint: Endpoint, wait_s: float) -> tuple[str, str]:
    """The server's first model: its name in requests, and where it is from, as far as the server tells."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            card = (await endpoint.get("/v1/models"))["data"][0]
            return str(card["id"]), str(card.get("root") or card["id"])
        except EndpointError:
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_READY_POLL_S)
        except (LookupError, TypeError, AttributeError):
            raise BenchError("the server names no model", code="no-model", fix="name it with --model") from None


async def _ready(target: Target, ask: Ask, wait_s: float) -> None:
    """Send one request until it is answered, for at most so long."""
    deadline = time.monotonic() + wait_s
    while wait_s > 0:
        answer = await target.ask(Ask(ask.prompt, ask.input_tokens, 1))
        if not answer.error:
            return
        if time.monotonic() >= deadline:
            raise EndpointError(f"not ready after {wait_s:g} s: {answer.error}")
        await asyncio.sleep(_READY_POLL_S)


def _endpoint(args: argparse.Namespace) -> Endpoint:
    headers = _pairs(args.header, "--header")
    key = os.environ.get("OPENAI_API_KEY")
    if key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {key}"
    if args.request_id_prefix is not None:
        headers["X-Request-Id"] = f"{args.request_id_prefix}{uuid.uuid4().hex[:8]}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    try:
        return Endpoint.of(args.base_url or f"http://{host}:{args.port}", headers, args.insecure)
    except ValueError as problem:
        raise FlagError(str(problem), code="flag-value") from None


def _fields(args: argparse.Namespace, model: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"model": model}
    for flag, _ in _SAMPLING:
        name = flag[2:].replace("-", "_")
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.chat_template_kwargs is not None:
        if args.backend != "openai-chat":
            raise FlagError("--chat-template-kwargs is for --backend openai-chat", code="flag")
        fields["chat_template_kwargs"] = args.chat_template_kwargs
    return {**fields, **(args.extra_body or {})}


def _pairs(words: Sequence[str] | None, flag: str) -> dict[str, str]:
    found = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not key or "\n" in word or "\r" in word:
            raise FlagError(f"{flag} {word!r} is not KEY=VALUE", code="flag-value")
        found[key.strip()] = value.strip()
    return found


def _wanted(args: argparse.Namespace) -> tuple[list[str], list[float], dict[str, float]]:
    """The times, the percentiles and the goals."""
    metrics = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    goals: dict[str, float] = {}
    try:
        percentiles = [float(text) for text in args.metric_percentiles.split(",")]
        for word in args.goodput or ():
            key, _, value = word.partition(":")
            goals[key] = float(value)
    except ValueError:
        raise FlagError("--metric-percentiles and --goodput take numbers", code="flag-value") from None
    for name in [*metrics, *goals]:
        if name not in TIMES:
            raise FlagError(f"there is no time {name!r}", code="flag-value", fix=f"the times are {', '.join(TIMES)}")
    if not all(0 <= one <= 100 for one in percentiles):
        raise FlagError("percentiles are from 0 to 100", code="flag-value")
    return metrics, percentiles, goals


def _save(args: argparse.Namespace, model: str, figures: dict[str, Any]) -> None:
    named = args.result_dir or args.result_filename or args.output_json
    if not (args.save_result or args.append_result or args.save_detailed or named):
        return
    date = time.strftime("%Y%m%d-%H%M%S")
    label = args.label or args.backend
    rate = args.request_rate if args.request_rate != float("inf") else "inf"
    facts = {
        "date": date,
        "backend": args.backend,
        "label": label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or model,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_pairs(args.metadata, "--metadata"),
    }
    name = args.result_filename or f"{label}-{rate}qps-{Path(model).name}-{date}.json"
    path = Path(args.output_json) if args.output_json else Path(args.result_dir or ".") / name
    save(path, {**facts, **figures}, args.append_result)
