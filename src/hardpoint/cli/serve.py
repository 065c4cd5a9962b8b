"""`hardpoint serve [MODEL] [flags]`: the parser, and the hand-over to the front end process."""

from __future__ import annotations

import argparse
from typing import Any

from hardpoint.config.arguments import FlagError, check_refused
from hardpoint.config.early_flags import apply_early_flags
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs, add_front_end_args
from hardpoint.config.flags import FLAGS
from hardpoint.config.sections import DEFAULT_MODEL
from hardpoint.errors import PluginError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.extensions.setting_words import PluginConfigError
from hardpoint.links.strays import mark_run
from hardpoint.log import configure, init_logger

logger = init_logger(__name__)
_SERVE = "hardpoint.processes.front_end:serve"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `serve` command. Loads the general plugins: they and the platform may add flags."""
    configure("front end")
    words = getattr(subparsers, "words", [])
    apply_early_flags(words)
    booted = _boot(words)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        usage="hardpoint serve [MODEL] [flags]",
        description=f"Serve a model over the OpenAI API. Without MODEL, {DEFAULT_MODEL} is fetched once and served.",
        epilog="Flags may be written with dashes or underscores. Numbers take k, m, g (decimal) and K, M, G (binary). "
        "JSON flags take dotted parts, e.g. --compilation-config.custom_ops+ +rms_norm.",
    )
    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="a folder, a .gguf file, a Hugging Face repository, owner/repo/file.gguf, or a name of `hardpoint models`",
    )
    parser.add_argument("--config", metavar="FILE", dest="config", help="YAML file of flags; the command line wins")
    # Taken out of the words before argparse sees them; declared for the help only.
    del parser._option_string_actions["--config"]
    add_front_end_args(parser)
    (AsyncEngineArgs if booted else EngineArgs).add_cli_args(parser)
    parser.set_defaults(run=run)
    return parser


def _boot(words: list[str]) -> bool:
    """Load the plugins; one that fails stops the command, but not its help, which is then without its flags."""
    # Whatever plugins start from here on must be found again when the server ends.
    mark_run()
    try:
        boot(Role.FRONT_END)
    except (PluginError, PluginConfigError) as error:
        if not {"-h", "--help"} & set(words):
            raise
        logger.error("this help lacks what plugins add: %s", error)
        return False
    return True


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; return the exit status."""
    choose_model(args)
    check_refused(FLAGS, args)
    return load_ref(_SERVE)(args)


def choose_model(args: argparse.Namespace) -> None:
    """Settle the model from its two spellings. Raises `FlagError` if they differ."""
    tag, flag = args.model_tag, getattr(args, "model", None)
    if tag is not None and flag is not None and tag != flag:
        raise FlagError(f"two models are given: {tag!r} and --model {flag!r}", code="flag")
    args.model = args.model_tag = tag or flag or DEFAULT_MODEL
