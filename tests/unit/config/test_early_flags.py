"""What must be known before plugins load is read from a command line nobody has parsed yet."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from hardpoint.config.arguments import FlagError, FlexibleArgumentParser, add_plugin_flags, plugin_words
from hardpoint.config.early_flags import apply_early_flags
from hardpoint.config.engine_args import EngineArgs
from hardpoint.errors import RegistrationError
from hardpoint.extensions.plugin_config import declare, get_plugin_config, plain_settings
from hardpoint.extensions.setting_words import VARIABLE, PluginConfigError


@dataclass
class Settings:
    threshold: float = 0.5
    fast: bool = False
    label: str | None = None


@pytest.fixture
def policy(monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "compatible")
    return lambda: os.environ["HARDPOINT_PLUGIN_POLICY"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model", "--plugin-policy", "strict", "--port", "1"], "strict"),
        (["--plugin_policy=strict"], "strict"),
        (["--config", "FILE"], "strict"),
        (["--config=FILE", "--plugin-policy=compatible"], "compatible"),
        (["--port", "1"], "compatible"),
    ],
)
def test_the_policy(policy, tmp_path, words, expected):
    (tmp_path / "serve.yaml").write_text("plugin_policy: strict\nport: 8001\nno-such-flag: {a: 1}\n")
    apply_early_flags([word.replace("FILE", str(tmp_path / "serve.yaml")) for word in words])
    assert policy() == expected


@pytest.mark.parametrize("words", [["--plugin-policy"], ["--plugin-policy", "lax"], ["--config", "/no/such.yaml"]])
def test_a_line_that_makes_no_sense_is_said_at_once(policy, words):
    with pytest.raises(FlagError):
        apply_early_flags(words)


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--plugin-config", "acme.threshold=0.7", "--plugin-config", "acme.label=7", "--port", "1"],
        ["--plugin_config=acme.threshold=0.7", "--plugin-config=acme.label=7"],
        ["--plugin-config.acme.threshold", "0.7", "--plugin-config.acme.label=7"],
        ["--plugin-config", '{"acme": {"threshold": 0.7, "label": "7"}}'],
        ["--config", "FILE"],
        ["--config", "OTHER", "--plugin-config", "acme.threshold=0.7"],
    ],
)
def test_settings_are_there_before_a_plugin_asks(tmp_path, words):
    (tmp_path / "file").write_text("plugin_config:\n  acme: {threshold: 0.7, label: '7'}\n")
    (tmp_path / "other").write_text("plugin-config:\n  acme: {threshold: 0.1, label: '7'}\n")
    files = {"FILE": str(tmp_path / "file"), "OTHER": str(tmp_path / "other")}
    apply_early_flags([files.get(word, word) for word in words])
    assert get_plugin_config("acme", Settings) == Settings(0.7, False, "7")


def test_a_section_that_is_no_mapping_is_named(tmp_path):
    (tmp_path / "file").write_text("plugin_config:\n  acme: 3\n")
    with pytest.raises(PluginConfigError, match=r"acme: 3: expected NAME\.key=value"):
        apply_early_flags(["--config", str(tmp_path / "file")])


def parser_with_flags():
    declare("acme", Settings, flags=True)
    parser = FlexibleArgumentParser(prog="hardpoint serve")
    EngineArgs.add_cli_args(parser)
    return parser


def test_a_declared_flag_is_read_when_the_plugin_asks_and_again_when_all_flags_are_known():
    words = ["--acme-threshold", "0.9", "--acme_fast", "--port", "1"]
    apply_early_flags(words)
    declare("acme", Settings, flags=True)
    assert get_plugin_config("acme") == Settings(0.9, True)
    parsed = parser_with_flags().parse_args(words[:3])
    args = EngineArgs.from_cli_args(parsed)
    assert args.plugin_config == ["acme.threshold=0.9", "acme.fast=true"]
    assert plain_settings() == {"acme": {"threshold": 0.9, "fast": True}}


def test_declared_flags_are_keys_of_the_configuration_file(tmp_path):
    (tmp_path / "file").write_text("acme-threshold: 0.25\nacme_fast: true\nacme-label: x y\n")
    apply_early_flags(["--config", str(tmp_path / "file")])
    declare("acme", Settings, flags=True)
    assert get_plugin_config("acme") == Settings(0.25, True, "x y")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Settings()),
        (["--acme-threshold", "0.9"], Settings(0.9)),
        (["--plugin-config", "acme.threshold=0.1", "--acme-threshold", "0.9"], Settings(0.9)),
        (["--acme-threshold", "0.9", "--plugin-config", "acme.threshold=0.1"], Settings(0.9)),
        (["--acme-fast", "--no-acme-fast"], Settings(fast=False)),
        (["--acme-label", "null"], Settings(label=None)),
    ],
)
def test_a_flag_of_a_plugin_is_its_setting_and_wins(words, expected):
    EngineArgs.from_cli_args(parser_with_flags().parse_args(words))
    assert get_plugin_config("acme") == expected


def test_the_help_shows_what_a_plugin_adds():
    text = parser_with_flags().format_help()
    assert "Plugin acme" in text
    assert "--acme-threshold THRESHOLD" in text
    assert "a number (default 0.5)" in text


def test_a_value_of_the_wrong_kind_is_an_error_of_that_flag():
    with pytest.raises(FlagError, match=r"argument --acme-threshold: is 'high': expected a number"):
        parser_with_flags().parse_args(["--acme-threshold", "high"])


def test_a_flag_that_is_taken_names_the_plugin():
    declare("acme", Settings, flags={"label": "--dtype"})
    parser = FlexibleArgumentParser()
    parser.add_argument("--dtype")
    with pytest.raises(RegistrationError, match=r"plugin 'acme' declares the flag --dtype, which `serve` has already"):
        add_plugin_flags(parser)


def test_without_declarations_the_parser_stays_as_it_is():
    parser = FlexibleArgumentParser()
    add_plugin_flags(parser)
    assert plugin_words(parser.parse_args([])) == []
    assert VARIABLE not in os.environ
