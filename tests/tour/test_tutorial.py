"""docs/tutorial-toy-plugin.md is followed to the letter: its files are written, its commands are run.

The test adds where it is run: a free port, the model's file, and no index to ask.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from server_process import ServerProcess

pytestmark = pytest.mark.server

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-toy-plugin.md"
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Fence:
    """A block of the page: its language, its mark such as `file=x.py`, and its text."""

    language: str
    mark: str
    text: str

    def commands(self) -> list[str]:
        return [line.removeprefix("$ ") for line in self.text.splitlines() if line.startswith("$ ")]

    def shown(self, command: str) -> str:
        """The output the page shows below a command."""
        after = self.text.partition(f"$ {command}\n")[2]
        return after.partition("$ ")[0].strip()


FENCES = [Fence(*found) for found in FENCE.findall(PAGE.read_text(encoding="utf-8"))]
CONSOLE = [fence for fence in FENCES if fence.language == "console" and not fence.mark]
[SERVER] = [fence for fence in FENCES if fence.mark == "terminal=server"]


@dataclass
class Walk:
    """The newcomer's two terminals: what the commands of the page printed, and the server they started."""

    printed: dict[str, str]
    server: ServerProcess


@pytest.fixture(scope="module")
def walk(make_environment, tmp_path_factory, smollm2_gguf):
    folder = tmp_path_factory.mktemp("newcomer")
    environment = make_environment()
    for fence in FENCES:
        if fence.mark.startswith("file="):
            path = folder / fence.mark.removeprefix("file=")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fence.text, encoding="utf-8")
    printed = {}

    def follow(fence, port):
        for command in fence.commands():
            adapted = command.replace("localhost:8000", f"127.0.0.1:{port}")
            adapted = adapted.replace("pip install", "python -m pip install -q --no-deps --no-build-isolation")
            adapted = re.sub(r"(^| )hardpoint ", r"\1python -m hardpoint ", adapted)
            done = subprocess.run(
                ["bash", "-ec", adapted], cwd=folder, env=environment.variables, capture_output=True, text=True,
                check=False, timeout=200,
            )  # fmt: skip
            assert done.returncode == 0 or is_only_slow(done.stdout), f"{command}\n{done.stdout}{done.stderr}"
            printed[command] = done.stdout

    before = [
        fence for fence in CONSOLE if "localhost" not in fence.text and FENCES.index(fence) < FENCES.index(SERVER)
    ]
    for fence in before:
        follow(fence, 0)
    [export, serve] = SERVER.commands()
    [program, word, *flags] = shlex.split(serve)
    assert (program, word) == ("hardpoint", "serve")
    variable, _, value = export.removeprefix("export ").partition("=")
    python = [str(environment.bin / "python"), "-m", "hardpoint"]
    variables = {**environment.variables, variable: value}
    with ServerProcess(smollm2_gguf, *flags, program=python, env=variables) as server:
        server.wait_ready()
        for fence in CONSOLE:
            if fence not in before:
                follow(fence, server.port)
        yield Walk(printed, server)


def is_only_slow(doctor: str) -> bool:
    """Whether doctor complains of nothing but the time that imports take, which is the machine's business here."""
    found = [line for line in doctor.splitlines() if line.startswith(("ERROR", "WARNING"))]
    return bool(found) and all(re.search(r"takes \d+ s in each process", line) for line in found)


def output_of(walk, part):
    [text] = [text for command, text in walk.printed.items() if part in command]
    return text


def test_every_block_of_the_page_is_a_file_or_is_run(walk):
    assert all(fence.language == "console" or fence.mark.startswith("file=") for fence in FENCES)
    commands = [command for fence in CONSOLE for command in fence.commands()]
    assert list(walk.printed) == commands
    for fence in CONSOLE:
        for command in fence.commands():
            assert fence.shown(command) in walk.printed[command]


def test_the_list_shows_the_new_entry_points(walk):
    shown = output_of(walk, "plugins list")
    for name in ("toy_parts", "toy_counter", "toy_route"):
        assert re.search(rf"{name}\b.*toy-plugin 0\.1\.0", shown), shown


def test_the_answer_is_not_paris_and_the_counter_counts(walk):
    answer = json.loads(output_of(walk, "completions"))
    assert not answer["choices"][0]["text"].startswith(" Paris")
    assert answer["usage"]["completion_tokens"] == 8
    assert "counting the tokens of m" in walk.server.log()


def test_the_ledger_says_what_the_page_says(walk):
    entries = json.loads(output_of(walk, "8000/plugins"))["ledger"]
    [layer] = [entry for entry in entries if (entry["kind"], entry["key"]) == ("override", "oot_ops")]
    said = re.search(r"\*(toy_plugin\.norm.*?)\*", PAGE.read_text(encoding="utf-8"))
    assert said is not None
    assert layer["detail"].startswith(said.group(1))
    registered = {entry["role"] for entry in entries if (entry["kind"], entry["key"]) == ("register", "oot_ops")}
    assert registered - {"inspector"} == {"engine_core+worker"}
    assert "toy-plugin 0.1.0" in output_of(walk, "plugins why")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [("toy_parts, toy_route", "VLLM_PLUGINS has ' toy_route', and names are compared with their spaces")],
)
def test_what_the_page_says_goes_wrong_does(walk, names, sentence):
    assert sentence in PAGE.read_text(encoding="utf-8")
    done = subprocess.run(
        [*walk.server.process.args[:3], "plugins", "doctor"],
        env={**os.environ, "VLLM_PLUGINS": names}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert sentence in done.stdout
    assert done.returncode == 1
