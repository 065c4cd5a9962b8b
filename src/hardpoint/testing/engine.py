"""A whole engine in this process, for suites and for tests of plugins that take part in steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hardpoint.llm import LLM
from hardpoint.testing.tiny_llama import tiny_model

_SMALL = {"max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20, "cpu_threads": 1}


@contextmanager
def engine_here(model: Path | str | None = None, **arguments: Any) -> Iterator[LLM]:
    """`LLM(model, **arguments)` with its engine core and worker in this process, shut down at the end.

    Classes need no import path this way, and a debugger sees all of it. The tiny model unless told otherwise.
    """
    with environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        llm = LLM(model=str(model or tiny_model()), **{**_SMALL, **arguments})
        try:
            yield llm
        finally:
            llm.llm_engine.shutdown()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
