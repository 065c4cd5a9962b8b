"""The table of environment variables is complete, and honest about what is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hardpoint
from hardpoint.env import ALWAYS_SO, UNREAD, VARIABLES, cache_root, envs
from hardpoint.errors import ConfigError

SOURCES = {path: path.read_text() for path in Path(hardpoint.__file__).parent.rglob("*.py")}
OWN = {"VLLM_CACHE_ROOT", "HARDPOINT_CACHE"}  # read by env.py itself


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_variable_is_read_somewhere_or_listed_as_unread(variable):
    name = re.compile(rf"\b{variable.name}\b")
    read = variable.name in OWN or any(
        name.search(text) for path, text in SOURCES.items() if path.name != "env.py" and "compat" not in path.parts
    )
    assert read is not (variable.name in UNREAD | ALWAYS_SO)


def test_names_are_unique_and_the_lists_name_known_ones():
    names = {variable.name for variable in VARIABLES}
    assert len(names) == len(VARIABLES)
    assert names >= UNREAD | ALWAYS_SO


def test_values_are_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "7")
    assert envs.VLLM_MAX_STOP_STRINGS == 7
    monkeypatch.delenv("VLLM_MAX_STOP_STRINGS")
    assert envs.VLLM_MAX_STOP_STRINGS == 4
    with pytest.raises(AttributeError, match="VLLM_NOPE"):
        _ = envs.VLLM_NOPE


@pytest.mark.parametrize(
    ("name", "text"),
    [("VLLM_MAX_STOP_STRINGS", "many"), ("VLLM_LOGGING_LEVEL", "LOUD"), ("HARDPOINT_PLUGIN_POLICY", "lax")],
)
def test_a_value_that_makes_no_sense_names_the_variable(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}={text!r} cannot be read"):
        getattr(envs, name)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("", False), ("true", True), ("no", False)])
def test_switches(monkeypatch, text, value):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", text)
    assert envs.VLLM_SERVER_DEV_MODE is value


def test_cache_folder(monkeypatch, tmp_path):
    for name in ("HARDPOINT_CACHE", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_root() == Path("~/.cache/hardpoint").expanduser()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "hardpoint"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "v"))
    assert cache_root() == tmp_path / "v"
    monkeypatch.setenv("HARDPOINT_CACHE", str(tmp_path / "h"))
    assert cache_root() == tmp_path / "h"
