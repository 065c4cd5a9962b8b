import logging

import pytest

from hardpoint.errors import PluginError
from hardpoint.extensions import groups
from hardpoint.extensions.ledger import ledger

STAT_LOGGER = """
from hardpoint.contracts.stat_logger import StatLoggerBase
class Mine(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0): pass
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): pass
    def log_engine_initialized(self): pass
def factory(): pass
"""
ENDPOINT = """
class Mine:
    name = "mine"
    required_tasks = None
    def attach_router(self, app): pass
    async def init_state(self, engine_client, state, args): pass
class Embeds(Mine):
    name = "embeds"
    required_tasks = ("embed", "classify")
class Misnamed(Mine):
    name = "other"
class Bare: pass
def raises(): raise RuntimeError("no endpoint today")
def exits(): raise SystemExit(3)
"""
LOGITS = """
from hardpoint.contracts.logits_processor import LogitsProcessorV1, LogitsProcessorV2
class One(LogitsProcessorV1): pass
class Two(LogitsProcessorV2): pass
class Outer:
    class Inner(LogitsProcessorV2): pass
class Neither: pass
"""


def messages(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_stat_logger_classes_come_in_order(install):
    install("stats", STAT_LOGGER, {"vllm.stat_logger_plugins": {"b": "p_stats:Mine", "a": "p_stats:Mine"}})
    assert [cls.__name__ for cls in groups.load_stat_logger_plugin_factories()] == ["Mine", "Mine"]
    assert groups.origin_label(groups.load_stat_logger_plugin_factories()[0]).startswith("p-stats 1.0")


def test_a_stat_logger_of_the_wrong_kind_stops_with_a_type_error_that_names_it(install):
    install("stats", STAT_LOGGER, {"vllm.stat_logger_plugins": {"bad": "p_stats:factory"}})
    with pytest.raises(TypeError, match="stat logger plugin 'bad' is a function") as caught:
        groups.load_stat_logger_plugin_factories()
    assert isinstance(caught.value, PluginError)
    assert "p-stats 1.0" in caught.value.origin


def test_a_stat_logger_that_cannot_be_imported_is_left_out(install, caplog):
    install("stats", "1/0", {"vllm.stat_logger_plugins": {"bad": "p_stats:Mine"}})
    assert groups.load_stat_logger_plugin_factories() == []
    assert "ZeroDivisionError" in messages(caplog, logging.ERROR)[0]


def endpoint(install, **points):
    install("points", ENDPOINT, {"vllm.endpoint_plugins": {k: f"p_points:{v}" for k, v in points.items()}})


def test_endpoints_load_only_when_named_and_it_is_said_once(install, caplog):
    endpoint(install, mine="Mine", embeds="Embeds")
    assert groups.load_endpoint_plugins(("generate",)) == []
    (warning,) = messages(caplog, logging.WARNING)
    assert "mine, embeds" in warning
    assert "VLLM_PLUGINS is not set" in warning


@pytest.mark.parametrize(("names", "count"), [("", 0), ("mine", 1), ("other", 0), (" mine", 0), ("mine,", 1)])
def test_the_allowlist_governs_endpoints_without_a_warning(install, caplog, monkeypatch, names, count):
    endpoint(install, mine="Mine")
    monkeypatch.setenv("VLLM_PLUGINS", names)
    assert len(groups.load_endpoint_plugins(("generate",))) == count
    assert messages(caplog, logging.WARNING) == []


@pytest.mark.parametrize(("tasks", "count"), [(("generate",), 0), (("embed",), 1), ((), 0), (None, 0)])
def test_an_endpoint_is_left_out_when_its_tasks_are_not_served(install, caplog, monkeypatch, tasks, count):
    caplog.set_level(logging.INFO, "hardpoint")
    endpoint(install, embeds="Embeds")
    monkeypatch.setenv("VLLM_PLUGINS", "embeds")
    assert len(groups.load_endpoint_plugins(tasks)) == count
    said = "is loaded" if count else "requires one of the tasks embed, classify"
    assert any(said in message for message in messages(caplog, logging.INFO))


def test_an_endpoint_without_tasks_loads_on_a_server_without_an_engine(install, monkeypatch):
    endpoint(install, mine="Mine")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert len(groups.load_endpoint_plugins(None)) == 1


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("raises", "its factory failed: RuntimeError: no endpoint today"),
        ("exits", "it called sys.exit(3)"),
        ("Bare", "lacks name, required_tasks, attach_router, init_state"),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_a_broken_endpoint_is_left_out_and_the_next_one_loads(install, caplog, monkeypatch, attribute, said):
    endpoint(install, bad=attribute, mine="Mine")
    monkeypatch.setenv("VLLM_PLUGINS", "bad,mine")
    assert [plugin.name for plugin in groups.load_endpoint_plugins(("generate",))] == ["mine"]
    (error,) = messages(caplog, logging.ERROR)
    assert said in error
    assert "'bad'" in error


def test_an_endpoint_with_another_name_is_remarked(install, caplog, monkeypatch):
    endpoint(install, mine="Misnamed")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert len(groups.load_endpoint_plugins(None)) == 1
    assert "calls itself 'other'" in messages(caplog, logging.WARNING)[0]


def test_an_import_that_stops_names_its_line(install):
    install("late", "import sys\n\nsys.not_there\n", {"vllm.logits_processors": {"late": "p_late:One"}})
    with pytest.raises(PluginError) as caught:
        groups.load_logits_processors()
    assert caught.value.origin.endswith("p_late.py:3")


@pytest.mark.parametrize("names", [None, "", "something"])
def test_logits_processors_of_both_interfaces_load_whatever_the_allowlist_says(install, monkeypatch, names):
    if names is not None:
        monkeypatch.setenv("VLLM_PLUGINS", names)
    install("logits", LOGITS, {"vllm.logits_processors": {"one": "p_logits:One", "two": "p_logits:Two"}})
    assert [cls.__name__ for cls in groups.load_logits_processors()] == ["One", "Two"]


def test_a_denied_logits_processor_does_not_load(install, monkeypatch):
    monkeypatch.setenv("HARDPOINT_PLUGINS_DENY", "one")
    install("logits", LOGITS, {"vllm.logits_processors": {"one": "p_logits:One", "two": "p_logits:Two"}})
    assert [cls.__name__ for cls in groups.load_logits_processors()] == ["Two"]


def test_a_logits_processor_that_cannot_be_imported_stops(install):
    install("logits", "1/0", {"vllm.logits_processors": {"bad": "p_logits:One"}})
    with pytest.raises(RuntimeError, match=r"'bad' cannot be imported.*ZeroDivisionError") as caught:
        groups.load_logits_processors()
    assert isinstance(caught.value, PluginError)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_logits_processor_of_neither_interface_stops(install):
    install("logits", LOGITS, {"vllm.logits_processors": {"bad": "p_logits:Neither"}})
    with pytest.raises(ValueError, match=r"'bad' is the class p_logits\.Neither"):
        groups.load_logits_processors()


def test_chosen_logits_processors_are_classes_or_references(install):
    install("logits", LOGITS, {})
    from p_logits import One, Outer, Two

    chosen = groups.resolve_logits_processors(["p_logits:One", Two, "p_logits:Outer.Inner"])
    assert chosen == [One, Two, Outer.Inner]
    assert groups.resolve_logits_processors(None) == []


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ("p_logits.One", ValueError),
        ("a:b:c", ValueError),
        ("p_logits:Neither", ValueError),
        (int, ValueError),
        ("not_there:One", RuntimeError),
        ("p_logits:Nope", AttributeError),
    ],
)
def test_a_chosen_logits_processor_that_is_none_is_refused(install, item, error):
    install("logits", LOGITS, {})
    with pytest.raises(error, match=r"One|a:b:c|Neither|int|Nope"):
        groups.resolve_logits_processors([item])


def test_io_processors_are_all_called_and_one_is_chosen_by_name(install, caplog):
    source = """
def fractions(): return "fractions.Fraction"
def none(): return None
def bad(): raise RuntimeError("no device")
def wrong(): return 3
def nowhere(): return "not_there.Processor"
def shapeless(): return "Processor"
def absent(): return "fractions.NotThere"
"""
    misplaced = ("nowhere", "shapeless", "absent")
    points = {name: f"p_io:{name}" for name in ("fractions", "none", "bad", "wrong", *misplaced)}
    install("io", source, {"vllm.io_processor_plugins": points})
    assert groups.load_io_processor_class("fractions").__name__ == "Fraction"
    warnings = messages(caplog, logging.WARNING)
    assert len(warnings) == 2
    assert "no device" in warnings[0]
    usable = ", ".join(("fractions", *misplaced))
    reasons = {"none": "gave None", "bad": "no device", "wrong": "gave an int", "unknown": ""}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=rf"no plugin provides it \(usable: {usable}.*{reason}"):
            groups.load_io_processor_class(name)
    for name in misplaced:
        with pytest.raises(ValueError, match=f"IO processor plugin '{name}' gave the class path"):
            groups.load_io_processor_class(name)
    called = {entry.name for entry in ledger.entries(kind="call", key="io_processors")}
    assert called == {"fractions", "none", "wrong", *misplaced}


@pytest.mark.parametrize("group", ["endpoints", "stat_loggers", "logits_processors", "io_processors", "request_hooks"])
def test_the_strict_policy_stops_with_all_problems(install, monkeypatch, group):
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "strict")
    monkeypatch.setenv("VLLM_PLUGINS", "one,two")
    name = groups.group_row(group).group
    install("one", "1/0", {name: {"one": "p_one:f"}})
    install("two", "import not_there", {name: {"two": "p_two:f"}})
    load = {
        "endpoints": lambda: groups.load_endpoint_plugins(("generate",)),
        "stat_loggers": groups.load_stat_logger_plugin_factories,
        "logits_processors": groups.load_logits_processors,
        "io_processors": groups.load_io_processors,
        "request_hooks": groups.load_request_hooks,
    }[group]
    with pytest.raises(PluginError, match=r"2 plugin problems: \(1\).*'one'.*\(2\).*'two'"):
        load()
