"""The command: quick, quiet about plugins, and one line per error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hardpoint import __version__
from hardpoint.cli import main as cli
from hardpoint.cli.main import COMMANDS, Command, main
from hardpoint.errors import ConfigError, StartError

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "numpy", "msgspec", "yaml", "argparse_", "zmq")


def run_python(code: str, *, debug: bool = False) -> subprocess.CompletedProcess:
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG" if debug else "INFO"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["-h"], []])
def test_help_and_version_import_nothing_heavy_and_load_no_plugin(words):
    code = (
        "import sys\n"
        "from hardpoint.cli.main import main\n"
        f"main({words!r})\n"
        "from hardpoint.extensions import ledger\n"
        "print([m for m in sys.modules if m.split('.')[0] in " + repr(HEAVY) + "], "
        "'hardpoint.extensions.boot' in sys.modules, len(ledger.entries()))"
    )
    assert run_python(code).stdout.splitlines()[-1] == "[] False 0"


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {command.name}" in out for command in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_help_of_its_own(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    assert f"hardpoint {command.name}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hardpoint {__version__}\n"


def test_unknown_command_has_a_near_miss(capsys):
    assert main(["serv"]) == 2
    assert "unknown command 'serv'; did you mean serve?" in capsys.readouterr().err


def test_module_form_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "hardpoint", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"hardpoint {__version__}\n"


@pytest.fixture
def command(monkeypatch):
    """A command whose run raises what a test wants."""

    def make(error: BaseException) -> Command:
        def run(args):
            raise error

        def add_parser(subparsers):
            subparsers.add_parser("toy", help="a toy").set_defaults(run=run)

        monkeypatch.setattr(cli, "load_ref", lambda ref: add_parser if ref.startswith("toy") else REAL(ref))
        return Command("toy", "toy", "a toy")

    return make


REAL = cli.load_ref


def test_errors_are_told_with_origin_and_fix(command, capsys):
    error = StartError("port 80 is taken", code="port-taken", origin="--port", fix="choose another")
    assert cli.run_command(command(error), []) == 1
    assert capsys.readouterr().err == "hardpoint: error: port 80 is taken\n  from: --port\n  fix: choose another\n"


def test_a_bad_flag_is_a_usage_error(command, capsys):
    assert cli.run_command(command(ConfigError("no", code="flag-x")), []) == 2
    assert cli.run_command(command(ConfigError("no")), ["--zzz"]) == 2
    assert "unknown flag --zzz" in capsys.readouterr().err


def test_an_unforeseen_error_is_one_line_and_debug_shows_the_rest(command, capsys, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("hardpoint"), "level", logging.INFO)
    logging.getLogger("hardpoint").manager._clear_cache()
    assert cli.run_command(command(RuntimeError("boom")), []) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: boom" in err
    assert "Traceback" not in err
    monkeypatch.setattr(logging.getLogger("hardpoint"), "level", logging.DEBUG)
    logging.getLogger("hardpoint").manager._clear_cache()
    assert cli.run_command(command(RuntimeError("boom")), []) == 1
    assert "Traceback" in capsys.readouterr().err
    logging.getLogger("hardpoint").manager._clear_cache()


def test_an_interrupt_is_no_error_message(command, capsys):
    assert cli.run_command(command(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_lead_nowhere_and_their_numbers_are_not_given_away(tmp_path, closed):
    program = """
import os, sys
from hardpoint.cli.main import main
status = main(["models", "list"])
other = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("seen nowhere", sys.stdin, sys.stderr.isatty(), sys.stdout.isatty())
os.write(other, f"{status} {other > 2}".encode())
"""
    said = tmp_path / "said"
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", program, str(said)]
    assert subprocess.run(command, capture_output=True, timeout=200).returncode == 0
    assert said.read_text() == "0 True"
