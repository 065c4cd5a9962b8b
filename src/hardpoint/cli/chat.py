"""`hardpoint chat`: a conversation with a running server."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from hardpoint.cli.api_client import ApiClient, add_client_args, client_of
from hardpoint.cli.interactive import ask_and_answer, show


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `chat` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat", help="talk to a running server", description="Talk to a running server. Ctrl-C stops an answer."
    )
    add_client_args(parser)
    parser.add_argument("--system-prompt", help="how the model should behave")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and end")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Hold a conversation, or answer one message with --quick."""
    client, body = client_of(args)
    messages: list[dict[str, str]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(line: str) -> None:
        asked = [*messages, {"role": "user", "content": line}]
        text = show(_pieces(client, {**body, "messages": asked}))
        # Only an answered message becomes part of the conversation.
        messages[:] = [*asked, {"role": "assistant", "content": text}]

    if args.quick is not None:
        answer(args.quick)
        return 0
    print(f"Talking to {body['model']} at {client.url}. Ctrl-C stops an answer, Ctrl-D ends.")
    return ask_and_answer(answer)


def _pieces(client: ApiClient, body: dict[str, Any]) -> Iterator[str]:
    for chunk in client.stream("/chat/completions", body):
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""
