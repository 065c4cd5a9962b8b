"""What planning ahead brings, and what a long prompt costs those who stream.

    python bench/scheduling.py [--model smollm2-135m-instruct] [--pairs 9] [--tokens 24]

Ahead: two engines in this process, one with `--async-scheduling` and one without, decode the same prompts in turn,
each beginning every other pair; the tokens must be the same. Gaps: one stream decodes while a prompt of 2,000 tokens
comes in; the longest wait between two of its tokens, and how long the prompt took, by the size of a step.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams


def make_core(model: str, ahead: bool) -> EngineCore:
    config = EngineArgs(
        model=model, max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=1024, async_scheduling=ahead,
        kv_cache_memory_bytes=512 << 20, enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip
    return EngineCore(config, Executor.get_class(config), log_stats=True)


def add(core: EngineCore, name: str, prompt: list[int], tokens: int) -> None:
    core.add_request(
        EngineCoreRequest(
            request_id=name, prompt_token_ids=prompt, mm_features=None, pooling_params=None, arrival_time=0.0,
            sampling_params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), lora_request=None,
            cache_salt=None, data_parallel_rank=None,
        )
    )  # fmt: skip


def prompt_of(seed: int, length: int) -> list[int]:
    return [(position * 7 + seed * 131) % 40000 + 100 for position in range(length)]


def decode(core: EngineCore, seed: int, streams: int, tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of all streams, from when each has its first; and the tokens."""
    made: dict[str, list[int]] = {f"{seed}-{number}": [] for number in range(streams)}
    for number, name in enumerate(made):
        add(core, name, prompt_of(seed * 16 + number, 32), tokens)
    started = None
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                made[output.request_id] += output.new_token_ids
        if started is None and all(made.values()):
            started, before = time.perf_counter(), sum(map(len, made.values()))
    assert started is not None
    return (streams * tokens - before) / (time.perf_counter() - started), list(made.values())


def compare(model: str, pairs: int, tokens: int) -> None:
    ahead, waiting = make_core(model, True), make_core(model, False)
    for streams in (1, 8):
        speeds: dict[str, list[float]] = {"ahead": [], "waiting": []}
        for pair in range(pairs):
            order = [("ahead", ahead), ("waiting", waiting)]
            answers = []
            for name, core in order if pair % 2 else reversed(order):
                speed, made = decode(core, pair, streams, tokens)
                speeds[name].append(speed)
                answers.append(made)
            assert answers[0] == answers[1], "planning ahead changes tokens"
        ratio = statistics.median(a / w for a, w in zip(speeds["ahead"], speeds["waiting"], strict=True))
        best = max(speeds["ahead"]) / max(speeds["waiting"])
        medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
        print(
            f"{streams} streams: tokens/s {medians}, ahead/waiting: median of pairs {ratio:.2f}, best runs {best:.2f}"
        )
    ahead.shutdown()
    waiting.shutdown()


def gaps(model: str) -> None:
    core = make_core(model, False)
    for size in (1024, 512, 256, 128):
        core.scheduler.max_num_scheduled_tokens = size  # type: ignore[attr-defined]
        add(core, f"stream-{size}", prompt_of(size, 16), 2000)
        for _ in range(4):
            core.step()
        add(core, f"prompt-{size}", prompt_of(size + 1, 2000), 1)
        waits, began = [], time.perf_counter()
        while f"prompt-{size}" in core.scheduler.requests:  # type: ignore[attr-defined]
            step = time.perf_counter()
            core.step()
            waits.append(time.perf_counter() - step)
        whole = time.perf_counter() - began
        core.abort_requests([f"stream-{size}"])
        core.step()
        print(f"steps of {size}: longest gap {max(waits):.2f} s, median {statistics.median(waits):.2f} s, "
              f"the prompt took {whole:.2f} s ({2000 / whole:.0f} tokens/s)")  # fmt: skip
    core.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    logging.getLogger("hardpoint").setLevel(logging.WARNING)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    compare(arguments.model, arguments.pairs, arguments.tokens)
    gaps(arguments.model)


if __name__ == "__main__":
    main()
