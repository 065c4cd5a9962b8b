"""`hardpoint serve`: its parser, and what is handed to the front end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hardpoint.cli import serve
from hardpoint.cli.main import main
from hardpoint.config.sections import DEFAULT_MODEL


@pytest.fixture
def handed(monkeypatch):
    """What the front end process would be given."""
    taken = []

    def load(ref):
        assert ref == "hardpoint.processes.front_end:serve"
        return lambda args: taken.append(args) or 0

    monkeypatch.setattr(serve, "load_ref", load)
    return taken


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], DEFAULT_MODEL),
        (["some/model"], "some/model"),
        (["--model", "some/model"], "some/model"),
        (["some/model", "--model=some/model"], "some/model"),
    ],
)
def test_model_in_either_spelling(handed, words, model):
    assert main(["serve", *words]) == 0
    assert handed[0].model == handed[0].model_tag == model


def test_two_different_models_are_an_error(handed, capsys):
    assert main(["serve", "a/b", "--model", "c/d"]) == 2
    assert "two models are given" in capsys.readouterr().err
    assert not handed


def test_every_flag_is_in_the_arguments(handed):
    main(["serve", "--port", "8001", "--api-key", "k", "--plugin-config", "toy.a=1"])
    (args,) = handed
    assert (args.port, args.api_key, args.plugin_config) == (8001, ["k"], ["toy.a=1"])
    assert args.max_model_len is None
    assert args.allowed_methods == ["*"]


def test_refused_flags_end_before_anything_starts(handed, capsys):
    assert main(["serve", "--fully-sharded-loras"]) == 2
    assert "--fully-sharded-loras is refused: each rank keeps the halves" in capsys.readouterr().err
    assert main(["serve", "--grpc"]) == 2
    assert "does not apply to this engine" in capsys.readouterr().err
    assert not handed


def test_help_is_grouped_and_mentions_the_configuration_file():
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "serve", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    titles = [line for line in done.stdout.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles[2:] == [
        "Server:",
        "Requests:",
        "Processes:",
        "Model:",
        "Load and weight offload:",
        "Attention and kernels:",
        "Parallel:",
        "Cache:",
        "Scheduler:",
        "LoRA:",
        "Multimodal:",
        "Structured outputs, reasoning, tools:",
        "Observability and logging:",
        "Compilation and general:",
        "Hardpoint:",
    ]
    assert "--config FILE" in done.stdout
    assert "--[no-]enable-prefix-caching" in done.stdout
    assert "--speculative-config" not in done.stdout


def test_serve_knows_flags_without_torch(handed):
    code = (
        "import sys; from hardpoint.cli.main import Subparsers; from hardpoint.cli.serve import add_parser\n"
        "add_parser(Subparsers([])); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "is empty"), (b"<html>404</html>", "does not start with the letters GGUF"), (b"GGUF\x03\0\0\0", "needs")],
)
def test_a_file_that_is_no_model_ends_the_start_with_one_message(tmp_path, content, reason):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint", "serve", str(path), "--host", "127.0.0.1", "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert str(path) in done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("  ")]) == 1
