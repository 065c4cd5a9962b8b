"""`hardpoint plugins new`: what is written, and what is refused."""

from __future__ import annotations

import tomllib

import pytest

from hardpoint.cli import plugins_new
from hardpoint.cli.main import main
from hardpoint.cli.plugins_new import examples, keys, new_plugin
from hardpoint.extensions.points import GROUPS

KEYS = keys()


def test_there_is_one_for_each_group():
    assert [row.key for row in GROUPS] == KEYS[: len(GROUPS)]


@pytest.mark.parametrize("key", KEYS)
def test_every_name_is_the_new_one(tmp_path, key):
    folder = new_plugin(key, "my-Thing.x", tmp_path / "new")
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"pyproject.toml", "README.md", "__init__.py", "test_my_thing_x.py"} <= {file.name for file in files}
    for file in files:
        text = file.read_text() + file.name
        assert "acme" not in text.lower(), file
        if file.suffix == ".py":
            compile(text.removesuffix(file.name), str(file), "exec")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-Thing.x"
    assert project["tool"]["setuptools"]["packages"] == ["my_thing_x"]
    assert not [file for file in files if "__pycache__" in file.parts]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "vllm.stat_logger_plugins", "my-logger"]) == 0
    assert (tmp_path / "my-logger" / "my_logger" / "__init__.py").is_file()
    assert "-m pytest" in capsys.readouterr().out
    assert main(["plugins", "new", "stat_loggers", "my-logger"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["plugins", "new", "models", "other", "--path", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "a" / "b" / "other" / "model.py").is_file()


@pytest.mark.parametrize(
    ("key", "name", "what"),
    [
        ("stat_logger", "x-y", "did you mean 'stat_loggers'?"),
        ("kv_connectors", "x-y", "does not have kv_connectors yet"),
        ("models", "json", "a module 'json' already"),
        ("models", "NumPy", "a module 'numpy' already"),
        ("models", "3x", "cannot be the name"),
        ("models", "a/b", "cannot be the name"),
        ("models", "../x", "cannot be the name"),
        ("models", "class-", "cannot be the name"),
        ("models", "", "cannot be the name"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, key, name, what):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", key, name]) == 2
    assert what in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_installation_without_examples_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins_new, "_HERE", tmp_path / "a" / "b" / "c")
    with pytest.raises(Exception, match="the example plugins are missing"):
        examples()


def test_a_wheel_brings_them_along():
    project = tomllib.loads((examples().parents[1] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["examples/plugins"] == "hardpoint/example_plugins"
