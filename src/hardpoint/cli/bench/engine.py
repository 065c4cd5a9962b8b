"""What the measurements of an engine share: the engine's flags, and an engine made from them."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from typing import Any

from hardpoint.config.early_flags import apply_early_flags
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs
from hardpoint.config.sections import DEFAULT_MODEL
from hardpoint.extensions.boot import boot
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.log import configure

NO_BEAMS = "generation has no beams"
NO_PROFILER = "the engine has no profiler"
_LLM = "hardpoint.llm:LLM"


def add_engine_arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the engine's flags. Loads the general plugins, which may add theirs, except for a help."""
    configure("main")
    apply_early_flags(words)
    asked_for_help = bool({"-h", "--help"} & set(words))
    if not asked_for_help:
        boot(Role.FRONT_END)
    (EngineArgs if asked_for_help else AsyncEngineArgs).add_cli_args(parser)
    # Repeated prompts would be answered from the cache of prefixes; statistics take time.
    parser.set_defaults(model=DEFAULT_MODEL, enable_prefix_caching=False, disable_log_stats=True)


def engine_of(args: argparse.Namespace) -> Any:
    """An `LLM` as the flags describe it."""
    return load_ref(_LLM).from_engine_args(EngineArgs.from_cli_args(args))


def random_prompts(llm: Any, count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Prompts of random token ids, all of one length."""
    draw = random.Random(seed)
    vocabulary = range(llm.model_config.get_vocab_size())
    return [{"prompt_token_ids": draw.choices(vocabulary, k=length)} for _ in range(count)]


def without_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without some flags that take a value each."""
    kept: list[str] = []
    skip = False
    for word in words:
        name = re.split("=", word, maxsplit=1)[0].replace("_", "-")
        if skip:
            skip = False
        elif name in flags:
            skip = "=" not in word
        else:
            kept.append(word)
    return kept
