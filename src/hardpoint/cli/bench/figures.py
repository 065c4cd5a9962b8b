"""From answers to figures, under the names that vLLM's result files have, and a table of them to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hardpoint.cli.bench.traffic import Answer, Outcome

# Short name -> what the table calls it.
TIMES = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "time between chunks",
    "e2el": "time of a whole request",
}


def times_ms(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """Every measured time in milliseconds, by short name."""
    return {
        "ttft": [1000 * one.first for one in answers if one.first is not None],
        "tpot": [1000 * one.per_token for one in answers if one.per_token is not None],
        "itl": [1000 * gap for one in answers for gap in one.gaps],
        "e2el": [1000 * one.taken for one in answers],
    }


def summary(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles of some milliseconds, under vLLM's names."""
    found = np.asarray(values, dtype=np.float64) if len(values) else np.zeros(1)
    figures = {
        f"mean_{name}_ms": float(found.mean()),
        f"median_{name}_ms": float(np.median(found)),
        f"std_{name}_ms": float(found.std()),
    }
    for percentile in percentiles:
        figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(found, percentile))
    return figures


def figures_of(
    outcome: Outcome, metrics: Sequence[str], percentiles: Sequence[float], goals_ms: dict[str, float]
) -> dict[str, Any]:
    """All figures of a run.

    metrics   short names of the times to summarise
    goals_ms  short name -> most milliseconds a request may take to count as good; empty: no such figure
    """
    good = [one for one in outcome.answers if not one.error]
    inputs, outputs = sum(one.input_tokens for one in good), sum(one.output_tokens for one in good)
    seconds = outcome.seconds
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcome.answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_meets(one, goals_ms) for one in good) / seconds if goals_ms else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": _most_at_once(outcome.answers),
    }
    times = times_ms(good)
    for name in metrics:
        figures.update(summary(name, times[name], percentiles))
    return figures


def _meets(answer: Answer, goals_ms: dict[str, float]) -> bool:
    times = times_ms([answer])
    return all(max(times[name], default=0.0) <= goal for name, goal in goals_ms.items())


def _most_at_once(answers: Sequence[Answer]) -> int:
    events = sorted(event for one in answers for event in ((one.started, 1), (one.started + one.taken, -1)))
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def details_of(outcome: Outcome) -> dict[str, Any]:
    """What `--save-detailed` adds: a list entry for each request."""
    answers = outcome.answers
    begun = min((one.started for one in answers), default=0.0)
    return {
        "input_lens": [one.input_tokens for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "start_times": [one.started - begun for one in answers],
        "ttfts": [one.first or 0.0 for one in answers],
        "itls": [one.gaps for one in answers],
        "generated_texts": [one.text for one in answers],
        "errors": [one.error for one in answers],
    }


def table(figures: dict[str, Any], metrics: Sequence[str]) -> str:
    """The figures, to read."""
    rows = [
        ("requests that succeeded", figures["completed"]),
        ("requests that failed", figures["failed"]),
        ("most at once", figures["max_concurrent_requests"]),
        ("duration, s", figures["duration"]),
        ("input tokens", figures["total_input_tokens"]),
        ("output tokens", figures["total_output_tokens"]),
        ("requests per second", figures["request_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("requests per second within the goals", figures["request_goodput"]))
    rows += [
        ("output tokens per second", figures["output_throughput"]),
        ("all tokens per second", figures["total_token_throughput"]),
    ]
    lines = [f"{name:<44}{shown(value):>12}" for name, value in rows]
    for name in metrics:
        lines.append(f"\n{TIMES[name]} ({name}), ms")
        own = {key: value for key, value in figures.items() if key.endswith(f"_{name}_ms")}
        lines += [f"  {key.split('_')[0]:<42}{shown(value):>12}" for key, value in own.items()]
    return "\n".join(lines)


def shown(value: float) -> str:
    """A number as a table has it."""
    return str(value) if isinstance(value, int) else f"{value:.2f}"
