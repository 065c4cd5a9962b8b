"""Backends that misbehave while they compile, for tests of the processes they do it in."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.engine_core.structured.guidance import GuidanceBackend
from hardpoint.front_end.parsers.thinking import ThinkFormat, ThinkingParser


class OddBackend(GuidanceBackend):
    """Does to the compiler what the regex says; anything else is compiled as usual."""

    def compile_grammar(self, request_type, grammar_spec, stop_token_ids=None):
        if grammar_spec == "hang":
            # As a library that holds the interpreter: nothing but the end of the process helps.
            while True:
                time.sleep(0.001)
        if grammar_spec == "grow":
            held = []
            while True:
                held.append(b"x" * (32 << 20))
        if grammar_spec == "crash":
            os.abort()
        if grammar_spec.startswith("count "):
            with Path(grammar_spec.removeprefix("count ")).open("a") as file:
                file.write(f"{os.getpid()}\n")
            grammar_spec = "[ab]{3}"
        if grammar_spec == "fail later":
            return FailsLater(super().compile_grammar(request_type, "[ab]{30}", stop_token_ids))
        return super().compile_grammar(request_type, grammar_spec, stop_token_ids)


class FailsLater:
    """A grammar that raises once four tokens are written."""

    def __new__(cls, grammar):
        kept, taken = grammar.fill_bitmask, []

        def fill(bitmask, index):
            taken.append(1)
            if len(taken) > 6:
                raise RuntimeError("the grammar is lost")
            kept(bitmask, index)

        grammar.fill_bitmask = fill
        grammar.fork = lambda: None
        return grammar


class AngleReasoning(ThinkingParser):
    """Reasoning as `<<...>`, with marks that even a random model finds."""

    format = ThinkFormat(starts=("<<",), ends=(">",))


class DashReasoning(ReasoningParser):
    """Reasoning that ends with the first of a few tokens, or that a prompt has ended already."""

    ENDS = range(0, 49152, 4)

    def is_reasoning_end(self, input_ids):
        return any(token in self.ENDS for token in input_ids[-1:])

    def extract_reasoning(self, model_output, request):
        return None, model_output
