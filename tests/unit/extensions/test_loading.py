import logging
import re
import sys

import pytest

from hardpoint.errors import ConfigError, PluginError
from hardpoint.extensions import loading
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.points import group_row
from hardpoint.extensions.registry import registry

GENERAL = group_row("general")


def load(key="general"):
    return [one for one in loading.load_group(group_row(key)) if not one.found.built_in]


def test_what_loads_is_in_the_ledger_with_its_file(install):
    plugin = install("one", "def f(): pass\n", {"vllm.general_plugins": {"one": "p_one:f"}}, version="2.0")
    (loaded,) = load()
    assert loaded.value is sys.modules["p_one"].f
    (entry,) = ledger.entries(kind="load", name="one")
    assert entry.origin.file == str(plugin.folder / "p_one.py")
    assert (entry.origin.distribution, entry.origin.version) == ("p-one", "2.0")
    assert entry.duration_s > 0
    assert [e.kind for e in ledger.entries(key="general", name="one")] == ["discover", "load"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import not_there\n", "No module named 'not_there'"),
        ("x = 1\n", "has no attribute 'f'"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", r"it called sys.exit\(3\)"),
    ],
)
def test_a_failed_import_is_skipped_with_an_error_and_the_others_load(install, caplog, source, said):
    install("bad", source, {"vllm.general_plugins": {"bad": "p_bad:f"}})
    install("good", "def f(): pass\n", {"vllm.general_plugins": {"good": "p_good:f"}})
    assert [one.found.name for one in load()] == ["good"]
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert "'bad' cannot be imported" in record.getMessage()
    assert "p-bad 1.0" in record.getMessage()
    assert "HARDPOINT_PLUGINS_DENY=bad" in record.getMessage()
    assert ledger.entries(kind="fault", name="bad")

    assert re.search(said, record.getMessage())


def test_what_loaded_and_what_did_not_can_be_asked(install, monkeypatch):
    install("bad", "import not_there\n", {"vllm.general_plugins": {"bad": "p_bad:f"}})
    install("good", "def f(): pass\n", {"vllm.general_plugins": {"good": "p_good:f", "other": "p_good:f"}}, "2.0")
    monkeypatch.setenv("HARDPOINT_PLUGINS_DENY", "other,lora_hf_hub_resolver")
    load()
    assert loading.loaded_plugins() == [("good", "p-good", "2.0")]
    failed, left_out = loading.absent_plugins()
    assert failed.startswith("plugin 'bad' cannot be imported from 'p_bad:f': ModuleNotFoundError")
    assert left_out == "plugin 'other' is left out: named in HARDPOINT_PLUGINS_DENY"


def test_an_interrupt_is_not_swallowed(install):
    install("bad", "raise KeyboardInterrupt\n", {"vllm.general_plugins": {"bad": "p_bad:f"}})
    with pytest.raises(KeyboardInterrupt):
        load()


def test_registrations_of_a_failed_import_are_undone(install):
    source = "from hardpoint.extensions.registry import registry\nregistry('models').register('Half', 'a:B')\n1/0\n"
    install("bad", source, {"vllm.general_plugins": {"bad": "p_bad:f"}})
    load()
    assert "Half" not in registry("models")
    assert ledger.entries(kind="rollback", name="Half")


def test_the_later_of_two_entry_points_with_one_name_wins_and_it_is_said(install, caplog):
    for name in ("one", "two"):
        install(name, "def f(): pass\n", {"vllm.general_plugins": {"same": f"p_{name}:f"}})
    (loaded,) = load()
    assert loaded.found.distribution == "p-two"
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "from p-one 1.0 and from p-two 1.0: the one of p-two 1.0 is used" in record.getMessage()


def test_the_earlier_stays_when_the_later_cannot_be_imported(install):
    install("one", "def f(): pass\n", {"vllm.general_plugins": {"same": "p_one:f"}})
    install("two", "1/0\n", {"vllm.general_plugins": {"same": "p_two:f"}})
    (loaded,) = load()
    assert loaded.found.distribution == "p-one"


def test_the_position_of_the_first_is_kept(install):
    install("one", "def f(): pass\n", {"vllm.general_plugins": {"same": "p_one:f", "other": "p_one:f"}})
    install("two", "def f(): pass\n", {"vllm.general_plugins": {"same": "p_two:f"}})
    assert [one.found.name for one in load()] == ["same", "other"]


def test_both_logits_processors_with_one_name_are_kept(install):
    for name in ("one", "two"):
        install(name, "class P: pass\n", {"vllm.logits_processors": {"same": f"p_{name}:P"}})
    assert [one.found.distribution for one in load("logits_processors")] == ["p-one", "p-two"]


def test_what_is_left_out_is_noted_with_the_reason_and_not_imported(install, monkeypatch):
    install("one", "raise RuntimeError\n", {"vllm.general_plugins": {"one": "p_one:f"}})
    monkeypatch.setenv("VLLM_PLUGINS", "two")
    assert load() == []
    (entry,) = ledger.entries(kind="skip", name="one")
    assert entry.detail == "not named in VLLM_PLUGINS"
    assert "p_one" not in sys.modules


def test_load_plugins_by_group_gives_names_and_objects_and_calls_nothing(install):
    install("one", "def f(): raise RuntimeError\n", {"vllm.general_plugins": {"one": "p_one:f"}, "x.y": {"z": "p_one"}})
    assert loading.load_plugins_by_group("vllm.general_plugins")["one"] is sys.modules["p_one"].f
    assert loading.load_plugins_by_group("x.y") == {"z": sys.modules["p_one"]}
    assert loading.load_plugins_by_group("no.such.group") == {}


def test_the_loggers_of_a_plugin_are_shown_at_info_unless_it_set_them_up(install):
    source = "import logging\nlogging.getLogger(__name__).info('hello')\n"
    install("shown", source, {"vllm.general_plugins": {"a": "p_shown"}})
    own = logging.getLogger("p_own")
    own.setLevel(logging.ERROR)
    install("own", "", {"vllm.general_plugins": {"b": "p_own"}})
    load()
    shown = logging.getLogger("p_shown")
    assert logging.getLogger("p_shown.sub").isEnabledFor(logging.INFO)
    assert not shown.propagate
    assert own.level == logging.ERROR
    assert own.propagate
    shown.handlers.clear()


def test_an_unknown_policy_is_refused(monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "stern")
    with pytest.raises(ConfigError, match="compatible, strict"):
        loading.is_strict()


def test_a_plugin_that_keeps_the_process_waiting_is_told_while_it_runs(install, monkeypatch, caplog):
    monkeypatch.setattr(loading, "_STUCK_S", 0.02)
    source = "import time\ndef f():\n    time.sleep(0.3)\n"
    install("slow", source, {"vllm.general_plugins": {"slow": "p_slow:f"}})
    (loaded,) = load()
    loading.call(GENERAL, loaded)
    assert "its call is still running" in caplog.text


def test_a_called_plugin_keeps_its_registrations_only_if_it_returns(install):
    source = """
from hardpoint.extensions.registry import registry
def good(): registry('models').register('Good', 'a:B')
def bad():
    registry('models').register('Bad', 'a:B')
    raise ValueError("no")
async def later(): pass
"""
    points = {"good": "p_one:good", "bad": "p_one:bad", "later": "p_one:later"}
    install("one", source, {"vllm.general_plugins": points})
    good, bad, later = load()
    loading.call(GENERAL, good)
    with pytest.raises(ValueError, match="no"):
        loading.call(GENERAL, bad)
    with pytest.raises(PluginError, match="coroutine function"):
        loading.call(GENERAL, later)
    assert "Good" in registry("models")
    assert "Bad" not in registry("models")
    assert registry("models").entry("Good").origin.entry_point == "good"


def test_who_an_object_came_from_is_known(install):
    install("one", "class P: pass\n", {"vllm.logits_processors": {"a": "p_one:P"}})
    (loaded,) = load("logits_processors")
    assert loading.owner_of(loaded.value).distribution == "p-one"
    assert loading.owner_of(object()) is None


def test_a_plugin_written_for_vllm_finds_our_classes(install):
    source = "from vllm.v1.metrics.loggers import StatLoggerBase\ndef f(): return StatLoggerBase\n"
    install("alias", source, {"vllm.general_plugins": {"alias": "p_alias:f"}})
    (loaded,) = load()
    assert loaded.value().__module__ == "hardpoint.contracts.stat_logger"
