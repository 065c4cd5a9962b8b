from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from hardpoint.errors import RegistrationError
from hardpoint.extensions import plugin_config
from hardpoint.extensions.boot import boot, load_stat_logger_plugin_factories, report_unused_settings
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.plugin_config import PluginConfigError, declare, deliver, get_plugin_config
from hardpoint.extensions.rows import Role
from hardpoint.extensions.setting_words import MAX_BYTES, VARIABLE
from hardpoint.testing import make_plugin

GENERAL = {"vllm.general_plugins": {"acme": "p_acme:register"}}
SOURCE = """
from dataclasses import dataclass
from hardpoint.extensions.plugin_config import declare, get_plugin_config

@declare("acme")
@dataclass
class Settings:
    threshold: float = 0.5
    label: str = ""

seen = []
def register():
    seen.append(get_plugin_config("acme"))
"""


@dataclass
class Server:
    port: int = 80


@dataclass
class Settings:
    threshold: float = 0.5
    mode: Literal["fast", "exact"] = "fast"
    names: list[str] = field(default_factory=list)
    server: Server = field(default_factory=Server)
    label: str = ""


class Model(BaseModel):
    threshold: float = Field(0.5, description="how sure to be")
    label: str = ""
    names: list[str] = []
    share: int | None = None

    @field_validator("threshold")
    @classmethod
    def positive(cls, value):
        if value < 0:
            raise ValueError("must not be negative")
        return value


def test_what_is_given_becomes_the_declared_object():
    deliver(["acme.threshold=0.7", "acme.mode=exact", "acme.names=a,b", "acme.server.port=81", "acme.label=007"])
    assert get_plugin_config("acme", Settings) == Settings(0.7, "exact", ["a", "b"], Server(81), "007")
    assert get_plugin_config("acme") is get_plugin_config("acme")


def test_without_anything_given_the_defaults_hold():
    declare("acme", Settings)
    assert get_plugin_config("acme") == Settings()


def test_a_mapping_is_taken_with_its_own_types():
    deliver({"acme": {"threshold": 1, "label": "1.10", "server": {"port": 8}}})
    assert get_plugin_config("acme", Settings) == Settings(1.0, label="1.10", server=Server(8))
    deliver({"acme": {"label": 7}})
    with pytest.raises(PluginConfigError, match=r"acme\.label is 7: expected text"):
        get_plugin_config("acme")
    deliver(['acme.label:="7"', "acme.names:=[]"])
    assert get_plugin_config("acme").label == "7"


def test_later_words_win_and_add_to_objects():
    deliver(['acme.server={"port": 1}', "acme.threshold=0.1", "acme.threshold=0.2", "acme.threshold=0.1"])
    deliver(['acme.server={"port": 1}', "acme.threshold=0.3", "acme.server.port=2"])
    assert get_plugin_config("acme", Settings) == Settings(0.3, server=Server(2))


def test_a_plugin_that_declares_nothing_gets_a_dict():
    deliver(["acme.a=1", "acme.b.c=x"])
    assert get_plugin_config("acme") == {"a": 1, "b": {"c": "x"}}
    assert get_plugin_config("other") == {}


def test_a_pydantic_model_converts_and_checks_for_itself():
    deliver(["acme.threshold=0.7", "acme.label=007", 'acme.names=["a"]', "acme.share=3"])
    assert get_plugin_config("acme", Model) == Model(threshold=0.7, label="007", names=["a"], share=3)


@pytest.mark.parametrize(
    ("kind", "words", "what"),
    [
        (Settings, ["acme.threshold=high"], "acme.threshold is 'high': expected a number"),
        (Settings, ["acme.treshold=1"], "acme.treshold is not known; did you mean 'threshold'?"),
        (Settings, ["acme.server.prot=1"], "acme.server.prot is not known; did you mean 'port'?"),
        (Settings, ["acme.mode=fst"], "acme.mode is 'fst': expected 'fast' or 'exact'; did you mean 'fast'?"),
        (Model, ["acme.threshold=high"], "acme.threshold is 'high': expected a number"),
        (Model, ["acme.threshold=-1"], "must not be negative"),
        (Model, ["acme.treshold=1"], "acme.treshold is not known; did you mean 'threshold'?"),
        (Model, ["acme.names=[1]"], "acme.names"),
    ],
)
def test_a_wrong_setting_names_plugin_key_expectation_and_fix(kind, words, what):
    deliver(words)
    with pytest.raises(PluginConfigError) as caught:
        get_plugin_config("acme", kind)
    assert caught.value.what.startswith("plugin 'acme': the setting")
    assert what in caught.value.what
    assert "acme." in caught.value.fix


def test_all_that_is_wrong_is_said_at_once():
    deliver(["acme.treshold=1", "acme.mode=x"])
    with pytest.raises(PluginConfigError, match=r"settings acme\.treshold .*; acme\.mode "):
        get_plugin_config("acme", Settings)


def test_a_setting_without_a_default_must_be_given():
    @dataclass
    class Needs:
        url: str

    with pytest.raises(PluginConfigError, match=r"acme\.url is missing: expected text"):
        get_plugin_config("acme", Needs)


@pytest.mark.parametrize(
    "word", ["acme", "acme.x", ".x=1", "acme.=1", "acme..x=1", "a b.x=1", "[1]", '{"acme": 3}', "{", "a.x:=x"]
)
def test_a_malformed_word_is_refused(word):
    with pytest.raises(PluginConfigError):
        deliver([word])
    assert VARIABLE not in os.environ


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(PluginConfigError, match="cannot be sent to other processes"):
        deliver({"acme": {"x": object()}})
    with pytest.raises(PluginConfigError, match="put what is large into a file"):
        deliver({"acme": {"x": "y" * MAX_BYTES}})
    with pytest.raises(PluginConfigError, match="x has a value already"):
        deliver(["acme.x=1", "acme.x.y=2"])


def test_the_environment_can_give_settings_and_the_line_adds_to_them(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"acme": {"threshold": 0.2, "label": "env"}}')
    deliver(["acme.threshold=0.9"])
    deliver(["acme.threshold=0.8"])
    assert get_plugin_config("acme", Settings) == Settings(0.8, label="env")
    monkeypatch.setenv(VARIABLE, "nonsense")
    with pytest.raises(PluginConfigError, match=f"environment variable {VARIABLE} cannot be read"):
        get_plugin_config("acme")


def test_children_have_the_settings():
    deliver(["acme.threshold=0.7"])
    code = "import json; from hardpoint.extensions.plugin_config import get_plugin_config as get\n"
    code += "print(json.dumps(get('acme')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"threshold": 0.7}


class NoSettings:
    pass


@pytest.mark.parametrize(
    ("name", "kind", "flags", "what"),
    [
        ("a b", Settings, False, "cannot be the name"),
        ("acme", NoSettings, False, "neither a dataclass nor a pydantic model"),
        ("acme", Settings(), False, "neither a dataclass nor a pydantic model"),
        ("acme", Settings, {"treshold": "--t"}, "did you mean 'threshold'"),
        ("acme", Settings, {"threshold": "-t"}, "is not a flag"),
        ("other", Server, False, "declared twice"),
        ("new", Server, {"port": "--other-threshold"}, "--other-threshold is a flag of"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(name, kind, flags, what):
    declare("other", Settings, flags=True)
    with pytest.raises(RegistrationError, match=what):
        declare(name, kind, flags)


def test_the_same_declaration_again_is_none():
    declare("acme", Settings)
    declare("acme", Settings, flags=True)
    assert [flag.flag for flag in plugin_config.setting_flags()][:2] == ["--acme-threshold", "--acme-mode"]


def test_flags_carry_help_and_default():
    declare("acme", Model, flags={"threshold": "--sure"})
    (flag,) = plugin_config.setting_flags()
    assert (flag.flag, flag.help, flag.default, flag.kind) == ("--sure", "how sure to be", 0.5, float)


# Through plugins


def test_a_plugin_reads_its_settings_in_its_function(install, platform):
    install("acme", SOURCE, GENERAL)
    deliver(["acme.threshold=0.7", "acme.label=7"])
    boot(Role.ENGINE_CORE)
    (seen,) = sys.modules["p_acme"].seen
    assert (seen.threshold, seen.label) == (0.7, "7")
    (entry,) = ledger.entries(kind="register", key="plugin_config")
    assert entry.origin.label == "p-acme 1.0, vllm.general_plugins: acme"


def test_a_wrong_setting_is_the_users_mistake_and_stops_with_its_own_error(install, platform):
    install("acme", SOURCE, GENERAL)
    deliver(["acme.treshold=0.7"])
    with pytest.raises(PluginConfigError, match="did you mean 'threshold'") as caught:
        boot(Role.WORKER)
    assert caught.value.origin == "p-acme 1.0, vllm.general_plugins: acme"


def test_a_wrong_setting_is_found_although_the_plugin_does_not_ask(install, platform):
    install("acme", SOURCE.replace("get_plugin_config(", "str("), GENERAL)
    deliver(["acme.threshold=x"])
    with pytest.raises(PluginConfigError, match="expected a number"):
        boot(Role.FRONT_END)


def test_a_module_that_asks_while_it_is_imported_stops_too(install, platform):
    install("acme", SOURCE + "\nget_plugin_config('acme')\n", GENERAL)
    deliver(["acme.threshold=x"])
    with pytest.raises(PluginConfigError, match="expected a number"):
        boot(Role.FRONT_END)


def test_a_stat_logger_can_declare_settings(install, platform):
    source = SOURCE + "\nfrom hardpoint.contracts.stat_logger import StatLoggerBase\nclass Log(StatLoggerBase): pass\n"
    install("acme", source, {"vllm.stat_logger_plugins": {"acme": "p_acme:Log"}})
    deliver(["acme.treshold=1"])
    boot(Role.FRONT_END)
    with pytest.raises(PluginConfigError, match="did you mean 'threshold'"):
        load_stat_logger_plugin_factories()


def test_a_plugin_that_fails_has_declared_nothing(install, platform, caplog):
    install("acme", SOURCE + "\nimport not_there\n", GENERAL)
    boot(Role.FRONT_END)
    assert plugin_config.declared() == []


def warned():
    return {entry.name: entry.detail for entry in ledger.entries(kind="warn", key="plugin_config")}


def test_settings_for_nobody_are_reported_in_the_front_end(install, platform, monkeypatch):
    install("acme", SOURCE, {**GENERAL, "vllm.logits_processors": {"proc": "p_acme:x"}})
    install("mute", "def register(): pass\n", {"vllm.general_plugins": {"mute": "p_mute:register"}})
    install("out", "def register(): pass\n", {"vllm.general_plugins": {"out": "p_out:register"}})
    deliver(["acme.label=x", "acne.label=x", "mute.x=1", "out.x=1", "nothing.x=1", "p_out.x=1", "p-acme.label=x"])
    monkeypatch.setenv("HARDPOINT_PLUGINS_DENY", "out")
    boot(Role.FRONT_END)
    found = warned()
    assert set(found) == {"acne", "out", "nothing", "p_out", "p-acme"}
    assert found["p-acme"].endswith("p-acme 1.0 has its settings under 'acme'")
    assert "no plugin of this name is installed or declares settings; did you mean 'acme'?" in found["acne"]
    assert "the plugin is left out (named in HARDPOINT_PLUGINS_DENY)" in found["out"]
    assert found["nothing"].endswith("declares settings")
    report_unused_settings(final=True)
    assert "neither declares nor reads settings" in warned()["mute"]
    count = len(ledger.entries(kind="warn", key="plugin_config"))
    report_unused_settings(final=True)
    assert len(ledger.entries(kind="warn", key="plugin_config")) == count


def test_one_report_is_enough(install, platform):
    deliver(["nothing.x=1"])
    boot(Role.ENGINE_CORE)
    assert warned() == {}


def test_the_strict_policy_stops_for_settings_that_reach_nobody(install, platform, monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "strict")
    deliver(["nothing.x=1"])
    with pytest.raises(Exception, match="settings are given for plugin 'nothing'"):
        boot(Role.FRONT_END)


def test_every_role_of_a_server_gets_the_same_object(tmp_path):
    from hardpoint.testing import boot_in_child

    source = SOURCE + "\n    import os\n    open(os.environ['OUT'], 'a').write(f'{seen[-1]}\\n')\n"
    plugin = make_plugin(tmp_path, "p-acme", source, GENERAL)
    environment = plugin.environment(
        OUT=str(tmp_path / "out"), VLLM_TARGET_DEVICE="cpu", **{VARIABLE: '["acme.threshold=0.7", "acme.label=7"]'}
    )
    for role in ("front_end", "engine_core", "worker", "inspector"):
        assert boot_in_child(role, environment).status == 0
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == ["Settings(threshold=0.7, label='7')"] * 4
