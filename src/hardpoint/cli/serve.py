"""`hardpoint serve [MODEL] [flags]`: the parser, and the hand-over to the front end process."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from hardpoint.config.arguments import FlagError, check_refused
from hardpoint.config.early_flags import apply_early_flags
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs, add_front_end_args
from hardpoint.config.flags import FLAGS
from hardpoint.config.sections import DEFAULT_MODEL
from hardpoint.errors import PluginError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.ledger import LedgerEntry, ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.extensions.setting_words import PluginConfigError
from hardpoint.links.strays import mark_run
from hardpoint.log import configure, init_logger

logger = init_logger(__name__)
_SERVE = "hardpoint.processes.front_end:serve"
_HEADLESS = "hardpoint.processes.headless:serve"
# How long a help waits for plugins, which may add flags; some import torch.
_HELP_WAIT_S = 10.0


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
    if not {"-h", "--help"} & set(words):
        boot(Role.FRONT_END)
        return True
    lacking = _boot_for_help()
    if lacking:
        logger.error("this help lacks what plugins add: %s", lacking)
    return not lacking


def _boot_for_help() -> str:
    """Load the plugins as far as a help may wait for them; return why not all of them have."""
    begun: list[LedgerEntry] = []
    stop_listening = ledger.listen(lambda entry: begun.append(entry) if entry.kind == "begin" else None)
    try:
        with _at_most(_HELP_WAIT_S):
            boot(Role.FRONT_END)
    except (PluginError, PluginConfigError) as error:
        return str(error)
    except _TooLong:
        doing = f"the {begun[-1].detail} of plugin {begun[-1].name!r}" if begun else "their loading"
        return f"{doing} takes longer than {_HELP_WAIT_S:g} s"
    finally:
        stop_listening()
    return ""


class _TooLong(BaseException):
    """Not an Exception: no fault rule of a plugin may take it for one of its own."""


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TooLong inside the block when it takes longer, where the system has alarms."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(number: int, frame: object) -> NoReturn:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; return the exit status."""
    choose_model(args)
    check_refused(FLAGS, args)
    return load_ref(_HEADLESS if args.headless else _SERVE)(args)


def choose_model(args: argparse.Namespace) -> None:
    """Settle the model from its two spellings. Raises `FlagError` if they differ, or one says nothing."""
    tag, flag = args.model_tag, getattr(args, "model", None)
    if "" in (tag, flag):
        raise FlagError("MODEL is an empty text", code="flag", fix=f"name a model, or leave it out for {DEFAULT_MODEL}")
    if tag is not None and flag is not None and tag != flag:
        raise FlagError(f"two models are given: {tag!r} and --model {flag!r}", code="flag")
    args.model = args.model_tag = tag or flag or DEFAULT_MODEL
