"""`hardpoint models list | pull | path`: the models that come by name."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hardpoint.config import catalogue
from hardpoint.config.arguments import FlagError
from hardpoint.config.catalogue import CatalogueModel
from hardpoint.config.sections import DEFAULT_MODEL, near_miss
from hardpoint.errors import ModelFileError


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `models` command and its three sub-commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "models", help="list, fetch and find the models of the catalogue", description=__doc__
    )
    commands = parser.add_subparsers(dest="models_command", metavar="list|pull|path", required=True)
    commands.add_parser("list", help="the models, and which are on this machine").set_defaults(run=run_list)
    pull = commands.add_parser("pull", help="fetch a model into the cache, unless it is there")
    pull.set_defaults(run=run_pull)
    path = commands.add_parser("path", help="print where a fetched model is")
    path.set_defaults(run=run_path)
    for command in (pull, path):
        command.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"the model (default {DEFAULT_MODEL})")
    return parser


def run_list(args: argparse.Namespace) -> int:
    """Print a line per model."""
    for model in catalogue.CATALOGUE:
        place = catalogue.local_path(model)
        print(f"{model.name:<24} {model.size_mb:>4} MB  {'here' if place else 'not fetched':<12} {model.about}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    """Fetch a model and print its place."""
    print(catalogue.pull(_model(args.name), _report))
    return 0


def run_path(args: argparse.Namespace) -> int:
    """Print the place of a model that is on this machine; an error if it is not."""
    model = _model(args.name)
    place: Path | None = catalogue.local_path(model)
    if place is None:
        raise ModelFileError(
            f"{model.name} is not on this machine", code="catalogue-absent", fix=f"hardpoint models pull {model.name}"
        )
    print(place)
    return 0


def _model(name: str) -> CatalogueModel:
    found = catalogue.find(name)
    if found is None:
        raise FlagError(
            f"there is no model {name!r} in the catalogue{near_miss(name, catalogue.names())}",
            code="flag",
            fix=f"the catalogue has {', '.join(catalogue.names())}",
        )
    return found


def _report(line: str) -> None:
    # Standard output holds the path alone, so that it can be used in scripts.
    print(line, file=sys.stderr)
