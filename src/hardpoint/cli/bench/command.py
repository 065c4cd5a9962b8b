"""`hardpoint bench serve | latency | throughput | startup`: chooses the measurement and makes its parser."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.config.arguments import FlagError
from hardpoint.config.sections import near_miss
from hardpoint.extensions.refs import load_ref


@dataclass(frozen=True, slots=True)
class Measurement:
    """One of the measurements: its module and what the help says of it."""

    name: str
    module: str
    about: str


# fmt: off
MEASUREMENTS = (
    Measurement("serve",      "hardpoint.cli.bench.serve",      "time requests to a running server with an OpenAI API"),
    Measurement("latency",    "hardpoint.cli.bench.latency",    "time one batch, again and again"),
    Measurement("throughput", "hardpoint.cli.bench.throughput", "tokens per second over many prompts at once"),
    Measurement("startup",    "hardpoint.cli.bench.startup",    "time from starting a process to its first token"),
)
# fmt: on
_BY_NAME = {one.name: one for one in MEASUREMENTS}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `bench` command. Only the chosen measurement's module is imported."""
    words: list[str] = getattr(subparsers, "words", [])
    chosen = _chosen(words)
    if chosen is None:
        return _overview(subparsers)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        f"bench {chosen.name}",
        usage=f"hardpoint bench {chosen.name} [flags]",
        description=f"{chosen.about[0].upper()}{chosen.about[1:]}. Flags have vLLM's names.",
    )
    parser.add_argument("measurement", choices=[chosen.name], help=argparse.SUPPRESS)
    module = chosen.module
    refused: dict[str, str] = load_ref(f"{module}:REFUSED")
    _refuse(chosen.name, refused, words[1:])
    load_ref(f"{module}:add_arguments")(parser, words[1:])
    parser.set_defaults(run=load_ref(f"{module}:run"), words=words[1:])
    return parser


def _chosen(words: Sequence[str]) -> Measurement | None:
    if not words or words[0].startswith("-"):
        return None
    if words[0] not in _BY_NAME:
        raise FlagError(
            f"there is no measurement {words[0]!r}{near_miss(words[0], list(_BY_NAME))}",
            code="flag",
            fix=f"the measurements are {', '.join(_BY_NAME)}",
        )
    return _BY_NAME[words[0]]


def _overview(subparsers: Any) -> argparse.ArgumentParser:
    rows = "\n".join(f"  {one.name:<12}{one.about}" for one in MEASUREMENTS)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        usage="hardpoint bench {serve,latency,throughput,startup} [flags]",
        description=f"Measure a server or an engine.\n\n{rows}",
        epilog="`hardpoint bench MEASUREMENT --help` tells the flags of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurement", choices=list(_BY_NAME), help=argparse.SUPPRESS)
    return parser


def _refuse(name: str, refused: dict[str, str], words: Sequence[str]) -> None:
    """Raise FlagError for a flag that vLLM's command has and ours has not."""
    for word in words:
        flag = word.split("=")[0].replace("_", "-")
        if flag in refused:
            raise FlagError(
                f"`hardpoint bench {name}` does not have {flag}: {refused[flag]}",
                code="flag",
                fix=f"see hardpoint bench {name} --help",
            )
