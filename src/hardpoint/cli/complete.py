"""`hardpoint complete`: have a running server continue a text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from hardpoint.cli.api_client import ApiClient, add_client_args, client_of
from hardpoint.cli.interactive import ask_and_answer, show


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `complete` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "complete",
        help="have a running server continue a text",
        description="Have a running server continue a text. Ctrl-C stops it.",
    )
    add_client_args(parser)
    once = parser.add_mutually_exclusive_group()
    once.add_argument("text", metavar="TEXT", nargs="?", help="continue this text, print the rest, and end")
    once.add_argument("-q", "--quick", metavar="TEXT", help="the same")
    # The API's default of 16 is short for somebody who reads along.
    parser.set_defaults(run=run, max_tokens=128)
    return parser


def run(args: argparse.Namespace) -> int:
    """Continue one text, or without one each line of the terminal."""
    client, body = client_of(args)
    text = args.quick if args.text is None else args.text

    def answer(line: str) -> None:
        show(_pieces(client, {**body, "prompt": line}))

    if text is not None:
        answer(text)
        return 0
    print(f"{body['model']} at {client.url} continues what you type. Ctrl-C stops it, Ctrl-D ends.")
    return ask_and_answer(answer)


def _pieces(client: ApiClient, body: dict[str, Any]) -> Iterator[str]:
    for chunk in client.stream("/completions", body):
        for choice in chunk["choices"]:
            yield choice["text"]
