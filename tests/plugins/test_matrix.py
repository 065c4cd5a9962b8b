"""Group x role x allowlist x fault, in processes that only boot a role."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint.testing import BootReport, Plugin, boot_in_child, make_plugin, plugin_environment

ROLES = ("front_end", "engine_core", "worker", "inspector")
GROUPS = {
    "general": "vllm.general_plugins",
    "platforms": "vllm.platform_plugins",
    "stat_loggers": "vllm.stat_logger_plugins",
    "endpoints": "vllm.endpoint_plugins",
    "io_processors": "vllm.io_processor_plugins",
    "logits_processors": "vllm.logits_processors",
}
# Which groups each role loads, in order.
LOADED_IN = {
    "front_end": ["platforms", "general", "stat_loggers", "logits_processors", "endpoints", "io_processors"],
    "engine_core": ["platforms", "general"],
    "worker": ["platforms", "general", "logits_processors"],
    "inspector": ["platforms", "general"],
}
MARK = """
import os
def mark(what):
    with open(os.environ["MARKS"], "a") as file:
        print(what, file=file)
mark("import GROUP")
"""
HEALTHY = {
    "general": "def point(): mark('call general')\n",
    "platforms": "def point():\n    mark('call platforms')\n    return None\n",
    "stat_loggers": """
from hardpoint.contracts.stat_logger import StatLoggerBase
class point(StatLoggerBase): pass
""",
    "endpoints": """
class point:
    name, required_tasks = "mine", None
    def __init__(self): mark("call endpoints")
    def attach_router(self, app): pass
    async def init_state(self, engine_client, state, args): pass
""",
    "io_processors": "def point():\n    mark('call io_processors')\n    return None\n",
    "logits_processors": """
from hardpoint.contracts.logits_processor import LogitsProcessorV2
class point(LogitsProcessorV2): pass
""",
}
CALLED = {"general", "platforms", "endpoints", "io_processors"}


def healthy(folder: Path, key: str, name: str = "mine", package: str = "") -> Plugin:
    package = package or f"m-{key.replace('_', '-')}"
    return make_plugin(folder / package, package, MARK.replace("GROUP", key) + HEALTHY[key], entry(key, name, package))


def broken(folder: Path, key: str, source: str) -> Plugin:
    return make_plugin(folder / "broken", "m-broken", source, entry(key, "bad", "m-broken"))


def entry(key: str, name: str, package: str) -> dict[str, dict[str, str]]:
    return {GROUPS[key]: {name: f"{package.replace('-', '_')}:point"}}


def boot(role: str, folder: Path, plugins: list[Plugin], allowlist: str | None, **variables: str) -> BootReport:
    marks = folder / "marks"
    marks.touch()
    environment = plugin_environment(plugins, MARKS=str(marks), **variables)
    for variable in ("VLLM_PLUGINS", "HARDPOINT_PLUGINS_DENY", "HARDPOINT_PLUGIN_POLICY", "VLLM_TARGET_DEVICE"):
        if variable not in variables:
            environment.pop(variable, None)
    if allowlist is not None:
        environment["VLLM_PLUGINS"] = allowlist
    return boot_in_child(role, environment)


def marks(folder: Path) -> list[str]:
    return (folder / "marks").read_text().splitlines()


@pytest.mark.parametrize("allowlist", [None, "", "mine", "other, mine", "mine,"])
@pytest.mark.parametrize("role", ROLES)
def test_each_role_loads_its_groups_once_in_order(tmp_path, role, allowlist):
    plugins = [healthy(tmp_path, key) for key in GROUPS]
    report = boot(role, tmp_path, plugins, allowlist)
    assert report.status == 0, report.output
    loads = [key for key in LOADED_IN[role] if _may_load(key, allowlist)]
    expected = []
    for key in loads:
        expected += [f"import {key}"] + ([f"call {key}"] if key in CALLED else [])
    assert marks(tmp_path) == expected
    assert [e.key for e in report.find("load", name="mine")] == loads
    assert {e.role for e in report.entries} == {role}
    assert len({e.pid for e in report.entries}) == 1
    skipped = {e.key for e in report.find("skip", name="mine") if "VLLM_PLUGINS" in e.detail}
    assert skipped == set(LOADED_IN[role]) - set(loads)


def _may_load(key: str, allowlist: str | None) -> bool:
    if key == "logits_processors":
        return True
    if allowlist is None:
        return key != "endpoints"
    return "mine" in allowlist.split(",")


@pytest.mark.parametrize("role", ROLES)
def test_one_line_sums_up_each_process(tmp_path, role):
    plugins = [healthy(tmp_path, "general"), healthy(tmp_path, "platforms")]
    report = boot(role, tmp_path, plugins, None)
    (line,) = [line for line in report.output.splitlines() if "plugins of" in line]
    assert f"plugins of {role} (" in line
    assert "mine (m-general 1.0, " in line
    assert "VLLM_PLUGINS is not set" in line


IMPORT_FAILS = "import package_that_is_not_there\n"
RAISES = "def point(): raise ValueError('boom')\n"
WRONG = {
    "general": "point = 3\n",
    "platforms": "def point(): return 3\n",
    "stat_loggers": "def point(): pass\n",
    "endpoints": "class point: pass\n",
    "io_processors": "def point(): return 3\n",
    "logits_processors": "class point: pass\n",
}
SKIP_ERROR, SKIP_WARNING, STOP = ("ERROR", 0), ("WARNING", 0), ("", 1)
# (group, fault): (level of the log line, exit status), type of the error that stops
OUTCOMES = {
    ("general", "import"): (SKIP_ERROR, ""),
    ("general", "raise"): (STOP, "PluginError"),
    ("general", "wrong"): (STOP, "PluginError"),
    ("platforms", "import"): (SKIP_WARNING, ""),
    ("platforms", "raise"): (SKIP_WARNING, ""),
    ("platforms", "wrong"): (STOP, "PluginError"),
    ("stat_loggers", "import"): (SKIP_ERROR, ""),
    ("stat_loggers", "wrong"): (STOP, "PluginTypeError"),
    ("endpoints", "import"): (SKIP_ERROR, ""),
    ("endpoints", "raise"): (SKIP_ERROR, ""),
    ("endpoints", "wrong"): (SKIP_ERROR, ""),
    ("io_processors", "import"): (SKIP_ERROR, ""),
    ("io_processors", "raise"): (SKIP_WARNING, ""),
    ("io_processors", "wrong"): (SKIP_WARNING, ""),
    ("logits_processors", "import"): (STOP, "PluginRuntimeError"),
    ("logits_processors", "wrong"): (STOP, "PluginValueError"),
}
ROLE_OF = {"general": "engine_core", "platforms": "worker", "logits_processors": "worker"}


def source_of(key: str, fault: str) -> str:
    return {"import": IMPORT_FAILS, "raise": RAISES, "wrong": WRONG[key]}[fault]


@pytest.mark.parametrize(("key", "fault"), OUTCOMES)
def test_a_fault_does_what_its_row_says(tmp_path, key, fault):
    (level, status), error = OUTCOMES[key, fault]
    role = ROLE_OF.get(key, "front_end")
    bad = broken(tmp_path, key, source_of(key, fault))
    good = healthy(tmp_path, key)
    # An allowlist where the group needs one. A platform named there would stop instead: the next test.
    report = boot(role, tmp_path, [bad, good], "bad,mine" if key == "endpoints" else None)
    assert report.status == status, report.output
    assert "m-broken 1.0" in report.output or "m-broken 1.0" in str(report.stops)
    assert report.find("fault", name="bad", key=key)
    if status:
        (stop,) = report.stops
        assert stop["type"] == error
        assert "'bad'" in stop["what"]
        assert f"in {role}" in stop["origin"]
        assert stop["fix"]
    else:
        lines = [line for line in report.output.splitlines() if "'bad'" in line and line.startswith(level)]
        assert len(lines) == 1, report.output
        assert report.find("load", name="mine", key=key), "the next plugin of the group loads"


@pytest.mark.parametrize(("key", "fault"), OUTCOMES)
def test_a_plugin_that_is_left_out_does_no_harm(tmp_path, key, fault):
    role = ROLE_OF.get(key, "front_end")
    bad = broken(tmp_path, key, source_of(key, fault))
    report = boot(role, tmp_path, [bad, healthy(tmp_path, key)], "bad,mine", HARDPOINT_PLUGINS_DENY="bad")
    assert report.status == 0, report.output
    assert report.find("load", name="mine", key=key)
    assert [e.detail for e in report.find("skip", name="bad")] == ["named in HARDPOINT_PLUGINS_DENY"]


@pytest.mark.parametrize("key", ["stat_loggers", "endpoints", "io_processors"])
@pytest.mark.parametrize("role", ["engine_core", "worker", "inspector"])
def test_a_broken_front_end_plugin_does_not_reach_the_other_roles(tmp_path, role, key):
    bad = broken(tmp_path, key, IMPORT_FAILS)
    report = boot(role, tmp_path, [bad], "bad")
    assert report.status == 0
    assert "package_that_is_not_there" not in report.output


@pytest.mark.parametrize("role", ["engine_core", "inspector"])
def test_a_broken_logits_processor_does_not_stop_roles_that_do_not_load_it(tmp_path, role):
    assert boot(role, tmp_path, [broken(tmp_path, "logits_processors", IMPORT_FAILS)], None).status == 0


@pytest.mark.parametrize("role", ROLES)
def test_a_platform_asked_for_by_name_stops_when_its_detector_raises(tmp_path, role):
    bad = broken(tmp_path, "platforms", RAISES)
    report = boot(role, tmp_path, [bad], "bad")
    assert report.status == 1
    assert "its detector failed: ValueError: boom" in report.stops[0]["what"]


@pytest.mark.parametrize("role", ROLES)
def test_a_failing_general_plugin_stops_every_role_and_leaves_nothing(tmp_path, role):
    source = "from hardpoint.extensions.registry import registry\n"
    source += "def point():\n    registry('models').register('Half', 'a:B')\n    raise ValueError('boom')\n"
    report = boot(role, tmp_path, [broken(tmp_path, "general", source)], None)
    assert report.status == 1
    who, _, place = report.stops[0]["origin"].partition(", at ")
    assert who == f"m-broken 1.0, vllm.general_plugins: bad, in {role}"
    assert place.endswith("m_broken.py:4")
    assert [e.name for e in report.find("rollback", key="models")] == ["Half"]


@pytest.mark.parametrize("key", GROUPS)
def test_two_entry_points_with_one_name(tmp_path, key):
    role = ROLE_OF.get(key, "front_end")
    twins = [healthy(tmp_path, key, package=f"m-{word}") for word in ("first", "second")]
    report = boot(role, tmp_path, twins, "mine")
    assert report.status == 0, report.output
    (line,) = [line for line in report.output.splitlines() if "twice, from" in line]
    assert line.startswith("WARNING")
    assert "m-first 1.0" in line
    assert "m-second 1.0" in line
    assert ("both are used" in line) == (key == "logits_processors")
    assert marks(tmp_path).count(f"import {key}") == 2
    if key in CALLED:
        assert marks(tmp_path).count(f"call {key}") == 1, "only the one that is used is called"


@pytest.mark.parametrize(("key", "fault"), OUTCOMES)
def test_the_strict_policy_stops_for_every_fault(tmp_path, key, fault):
    role = ROLE_OF.get(key, "front_end")
    bad = broken(tmp_path, key, source_of(key, fault))
    report = boot(role, tmp_path, [bad], "bad", HARDPOINT_PLUGIN_POLICY="strict")
    assert report.status == 1, report.output
    assert "'bad'" in report.stops[0]["what"]
