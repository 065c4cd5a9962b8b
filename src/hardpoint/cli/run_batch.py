"""`hardpoint run-batch -i IN -o OUT [flags]`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
from typing import Any

from hardpoint.cli.serve import choose_model
from hardpoint.config.arguments import check_refused
from hardpoint.config.early_flags import apply_early_flags
from hardpoint.config.engine_args import AsyncEngineArgs, add_flags
from hardpoint.config.flags import ENGINE_FLAGS, FRONT_END, MODEL
from hardpoint.extensions.boot import boot
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.links.strays import mark_run
from hardpoint.log import configure

_RUN = "hardpoint.processes.batch:run"
# Of how requests are answered, what only a client on the network would see.
_OF_A_SERVER = (
    "enable_server_load_tracking",
    "enable_force_include_usage",
    "sse_keep_alive_interval",
    "enable_tokenizer_info_endpoint",
)
_REQUEST_FLAGS = tuple(flag for flag in FRONT_END["Requests"] if flag.dest not in _OF_A_SERVER)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `run-batch` command. Loads the general plugins: they and the platform may add flags."""
    configure("front end")
    apply_early_flags(getattr(subparsers, "words", []))
    mark_run()
    boot(Role.FRONT_END)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run-batch",
        help="answer the requests of a file",
        usage="hardpoint run-batch [MODEL] -i FILE -o FILE [flags]",
        description="Answer the requests of an OpenAI batch file: a JSON object a line with custom_id, method, url and "
        "body. An interrupted run goes on where it ended when the same command is given again.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as for `hardpoint serve`")
    files = parser.add_argument_group("Files")
    files.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests: a file or an http(s) address"
    )
    files.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="results: a file, or an address they are PUT to"
    )
    files.add_argument("--output-tmp-dir", metavar="FOLDER", help="where results for an address are collected")
    files.add_argument("--no-resume", action="store_true", help="ask anew what an interrupted run already answered")
    add_flags(parser, "Requests", _REQUEST_FLAGS)
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Answer the batch; return the exit status."""
    choose_model(args)
    check_refused((MODEL, *ENGINE_FLAGS, *_REQUEST_FLAGS), args)
    return load_ref(_RUN)(args)
