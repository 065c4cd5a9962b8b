"""The command `hardpoint`. Each sub-command is a module with `add_parser` and `run`, imported when it is chosen.

`--help` and `--version` import none of them and load no plugin.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint import __version__
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.extensions.refs import load_ref

USAGE_ERROR, FAILURE, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: its module and what `--help` says of it."""

    name: str
    module: str
    about: str


# fmt: off
COMMANDS = (
    Command("serve",     "hardpoint.cli.serve",     "serve a model over the OpenAI API"),
    Command("chat",      "hardpoint.cli.chat",      "talk to a running server"),
    Command("complete",  "hardpoint.cli.complete",  "have a running server continue a text"),
    Command("run-batch", "hardpoint.cli.run_batch", "answer the requests of a file"),
    Command("bench",     "hardpoint.cli.bench.command", "measure a server or an engine"),
    Command("models",    "hardpoint.cli.models",    "list, fetch and find the models of the catalogue"),
    Command("plugins",   "hardpoint.cli.plugins",   "list extension points, explain one, find faults, begin a plugin"),
    Command("alias",     "hardpoint.cli.alias",     "let programs that are not ours say `import vllm`"),
)
# fmt: on
_BY_NAME = {command.name: command for command in COMMANDS}


class Subparsers:
    """Stands where argparse puts sub-parsers: a command's own parser is the only one that is made.

    words  the command line after the command's name
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.parser: argparse.ArgumentParser | None = None

    def add_parser(self, name: str, *, help: str = "", **options: Any) -> argparse.ArgumentParser:
        """Make the parser of the command `name`."""
        make = load_ref("hardpoint.config.arguments:FlexibleArgumentParser")
        self.parser = make(prog=f"hardpoint {name}", **options)
        return self.parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0, 1 for a failure, 2 for a line that makes no sense."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] in ("-v", "-V", "--version", "version"):
        print(f"hardpoint {__version__}")
        return 0
    command = _BY_NAME.get(words[0])
    if command is None:
        return _unknown(words[0])
    return run_command(command, words[1:])


def _open_standard_streams() -> None:
    """Let what was closed by whoever started us lead nowhere: else the next socket gets its number, and its output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for good


def overview() -> str:
    """The text of `hardpoint --help`."""
    lines = ["usage: hardpoint COMMAND [flags]", "", "An LLM inference server whose every part can be replaced.", ""]
    lines += ["commands:", *(f"  {command.name:<10} {command.about}" for command in COMMANDS), ""]
    lines += ["  --version  print the version", "", "`hardpoint COMMAND --help` tells the flags of a command."]
    return "\n".join(lines)


def run_command(command: Command, words: list[str]) -> int:
    """Parse a command's line and run it. Errors become one message and an exit status."""
    try:
        subparsers = Subparsers(words)
        load_ref(f"{command.module}:add_parser")(subparsers)
        assert subparsers.parser is not None
        args = subparsers.parser.parse_args(words)
        return int(args.run(args) or 0)
    except HardpointError as error:
        return explain(error, command.name)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone, e.g. `| head`.
        sys.stderr.close()
        return 0
    except Exception as error:
        return _unexpected(error)


def explain(error: HardpointError, command: str = "") -> int:
    """Print an error that a person can act on; return the exit status."""
    usage = error.code.startswith("flag")
    print(f"hardpoint{' ' + command if command and usage else ''}: error: {error.what}", file=sys.stderr)
    origin = error.origin
    if not origin and isinstance(error, ConfigError):
        origin = load_ref("hardpoint.config.flags:flag_behind")(error.what)
    if origin:
        print(f"  from: {origin}", file=sys.stderr)
    if error.fix:
        print(f"  fix: {error.fix}", file=sys.stderr)
    _traceback(error)
    return USAGE_ERROR if usage else FAILURE


def _unexpected(error: Exception) -> int:
    from hardpoint.extensions.faults import leave_out
    from hardpoint.extensions.ledger import plugin_behind, plugin_place

    print(f"hardpoint: error: {type(error).__name__}: {error}", file=sys.stderr)
    fix = "this is not an error we know"
    plugin = plugin_behind(error)
    if plugin is not None:
        print(f"  from: {plugin.label}, at {plugin_place(error)}", file=sys.stderr)
        fix = leave_out(plugin)
    if not _traceback(error):
        print(f"  fix: {fix}; VLLM_LOGGING_LEVEL=DEBUG shows the traceback", file=sys.stderr)
    return FAILURE


def _traceback(error: BaseException) -> bool:
    shown = logging.getLogger("hardpoint").isEnabledFor(logging.DEBUG)
    if shown:
        traceback.print_exception(error)
    return shown


def _unknown(word: str) -> int:
    close = difflib.get_close_matches(word, list(_BY_NAME), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    print(f"hardpoint: error: unknown command {word!r}{hint}", file=sys.stderr)
    print(f"  fix: the commands are {', '.join(_BY_NAME)}", file=sys.stderr)
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
