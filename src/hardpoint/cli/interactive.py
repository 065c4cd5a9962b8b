"""A question-and-answer loop at the terminal: Ctrl-C stops an answer, Ctrl-D or a second Ctrl-C ends the loop."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from hardpoint.cli.api_client import ApiClientError


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; return the whole text. Ctrl-C ends it early and keeps what there is."""
    shown: list[str] = []
    with closing(pieces):  # type: ignore[type-var]
        try:
            for piece in pieces:
                shown.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            sys.stdout.write(" [stopped]")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return "".join(shown)


def ask_and_answer(answer: Callable[[str], None]) -> int:
    """Read lines and answer each until the input ends; a refused line is told and the loop goes on."""
    with suppress(ImportError):
        # Line editing and history, where Python has them.
        importlib.import_module("readline")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not line.strip():
            continue
        try:
            answer(line)
        except ApiClientError as error:
            print(f"error: {error}", file=sys.stderr)
            if error.code == "no-server":
                return 1
