"""Every command line of ours in the documents is one that its command takes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from hardpoint.cli.main import COMMANDS, Subparsers
from hardpoint.extensions.refs import load_ref

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# In a block of code: maybe a prompt, variables and a folder first, an explanation after two spaces last.
LINE = re.compile(r"^(?: {4,}|\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?hardpoint ([a-z]+\b.*?)(?:\s{2,}\S.*|\s+#.*)?$")
MODULES = {command.name: command.module for command in COMMANDS}


def commands() -> list[str]:
    found = []
    for page in PAGES:
        in_code = False
        for line in page.read_text(encoding="utf-8").splitlines():
            in_code ^= line.startswith("```")
            match = LINE.match(line) if in_code or line.startswith("    ") else None
            # Flags of a plugin that is not here are not ours to check.
            if match is not None and "..." not in match[1] and "--my-plugin" not in match[1]:
                found.append(match[1].rstrip(" \\&"))
    return list(dict.fromkeys(found))


def test_the_documents_have_command_lines():
    assert {line.split()[0] for line in commands()} >= {"serve", "chat", "complete", "models", "plugins"}


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_line_is_taken(line, monkeypatch, tmp_path):
    (tmp_path / "serve.yaml").write_text("port: 8001\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # Some flags are put there at once.
    name, *words = shlex.split(line, comments=True)
    subparsers = Subparsers(words)
    load_ref(f"{MODULES[name]}:add_parser")(subparsers)
    assert subparsers.parser is not None
    if "--help" in words:
        with pytest.raises(SystemExit, match=r"^0$"):
            subparsers.parser.parse_args(words)
    else:
        assert subparsers.parser.parse_args(words).run
