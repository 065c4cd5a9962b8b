"""`--tool-parser-plugin` and `--reasoning-parser-plugin`: every form of the value, and what is wrong with files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hardpoint.errors import ConfigError, PluginError
from hardpoint.extensions import parser_files
from hardpoint.extensions.chosen import check_choice
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.parser_files import import_parser_file
from hardpoint.extensions.registry import isolated, registry

PARSER = """
from hardpoint.contracts.tool_parser import ToolParser
from hardpoint.extensions.parser_managers import ToolParserManager
import sys
sys.ran = getattr(sys, "ran", 0) + 1
@ToolParserManager.register_module(["toy_tool", "toy_too"])
class Toy(ToolParser):
    def extract_tool_calls(self, model_output, request):
        raise NotImplementedError
"""


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(parser_files, "_imported", {})
    monkeypatch.setattr(sys, "ran", 0, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "on_path"))
    with isolated():
        yield
    for name in [name for name in sys.modules if name.startswith((parser_files._PREFIX, "acme_parsers"))]:
        del sys.modules[name]


def write(path, text=PARSER):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("toy.py", "{cwd}/toy.py"),
        ("toy.py", "toy.py"),
        ("toy.py", "./toy.py"),
        ("a b/to y.py", "a b/to y.py"),
        ("toy.py", "~/toy.py"),
        ("json.py", "json.py"),
        ("on_path/acme_parsers/toy.py", "acme_parsers.toy"),
        ("on_path/acme_parsers.py", "acme_parsers"),
        ("sub/noext", "sub/noext.py"),
    ],
)
def test_every_form_of_the_value(tmp_path, file, value):
    write(file if file != "sub/noext" else "sub/noext.py")
    value = value.format(cwd=tmp_path)
    for _ in range(2):
        assert choose_parser("tool_parsers", "toy_tool", value).__name__ == "Toy"
    assert sys.ran == 1
    assert "json" not in value or sys.modules["json"].__name__ == "json"


def test_a_file_runs_once_however_it_is_written(tmp_path):
    write("toy.py")
    os.symlink("toy.py", "link.py")
    for value in ("toy.py", "./toy.py", str(tmp_path / "toy.py"), "~/toy.py", "link.py"):
        import_parser_file(value, "tool_parsers")
    assert sys.ran == 1


def test_the_ledger_knows_the_file(tmp_path):
    write("toy.py")
    import_parser_file("toy.py", "tool_parsers")
    entry = registry("tool_parsers").entry("toy_tool")
    assert entry.origin.file == str((tmp_path / "toy.py").resolve())
    assert any(e.kind == "load" and "toy_tool" in e.detail for e in ledger.why("tool_parsers", "toy.py"))


@pytest.mark.parametrize(
    ("value", "text", "says"),
    [
        ("gone.py", None, r"there is no file .*gone\.py"),
        ("no_such_module.parsers", None, "there is no module 'no_such_module'"),
        ("ab", None, "there is no module 'ab'"),
        ("bad.py", "def f(:\n    pass\n", r"\(.*bad\.py, line 1\)"),
        ("bad.py", "\n\nboom()\n", r"NameError: .*\(.*bad\.py, line 3\)"),
        ("bad.py", "\nimport no_such_dependency\n", r"no_such_dependency.*\(.*bad\.py, line 2\)"),
        ("acme_parsers", "import no_such_dependency\n", r"ModuleNotFoundError: .*no_such_dependency.*acme_parsers\.py"),
        ("bad.py", "raise SystemExit(3)\n", r"SystemExit: 3 \(.*bad\.py, line 1\)"),
    ],
)
def test_what_is_wrong_shows_file_line_and_reason(value, text, says):
    if text is not None:
        write(value if value.endswith(".py") else f"on_path/{value}.py", text)
    with pytest.raises(PluginError, match=says) as caught:
        import_parser_file(value, "tool_parsers")
    assert "--tool-parser-plugin" in str(caught.value)
    assert [e.kind for e in ledger.why("tool_parsers", value)][-1] == "fault"


def test_what_a_broken_file_registered_is_undone():
    write("bad.py", PARSER + "\nraise ValueError('too late')\n")
    with pytest.raises(PluginError, match="too late"):
        import_parser_file("bad.py", "tool_parsers")
    assert "toy_tool" not in registry("tool_parsers")


def test_another_name_is_an_error_that_lists_what_was_registered():
    write("toy.py")
    with pytest.raises(
        ConfigError, match=r"'toy' is not registered; --tool-parser-plugin 'toy.py' registered toy_tool, toy_too"
    ):
        choose_parser("tool_parsers", "toy", "toy.py")


def test_a_file_without_a_choice_is_imported_all_the_same():
    write("toy.py")
    assert choose_parser("tool_parsers", None, "toy.py") is None
    assert "toy_tool" in registry("tool_parsers")


def test_doctor_and_friends_import_what_the_flag_names():
    write("toy.py")
    assert check_choice("tool_parser_plugin", "./toy.py").Toy is registry("tool_parsers").load("toy_tool")
    with pytest.raises(PluginError, match="--reasoning-parser-plugin"):
        check_choice("reasoning_parser_plugin", "gone.py")
