import io
import json

import pytest

from hardpoint.extensions.points import GROUPS
from hardpoint.extensions.report import boot_in_child, groups_of, write_report
from hardpoint.extensions.rows import Role
from hardpoint.testing import make_plugin, plugin_environment

CLEAN = {"VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}


def test_each_role_loads_the_groups_its_column_says():
    later = {row.key: row.roles for row in GROUPS if row.key not in ("general", "platforms")}
    for role in (Role.FRONT_END, Role.ENGINE_CORE, Role.WORKER, Role.INSPECTOR):
        assert set(groups_of(role)) == {key for key, roles in later.items() if role in roles}


@pytest.mark.usefixtures("platform")
def test_a_report_is_lines_of_entries_and_an_outcome(install):
    install("one", "def f(): pass", {"vllm.general_plugins": {"one": "p_one:f"}})
    out = io.StringIO()
    assert write_report(Role.WORKER, [], {"worker_cls": "auto"}, out) == 0
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    kinds = [line["entry"]["kind"] for line in lines if "entry" in line and line["entry"]["name"] == "one"]
    assert kinds == ["discover", "begin", "load", "begin", "call"]
    assert lines[-1]["outcome"]["stops"] == []


def test_a_child_that_ends_in_the_middle_names_the_plugin(tmp_path):
    plugin = make_plugin(
        tmp_path, "p-dies", "import os\ndef f(): os._exit(7)\n", {"vllm.general_plugins": {"dies": "p_dies:f"}}
    )
    report = boot_in_child("engine_core", plugin_environment([plugin], VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="dies"))
    assert (report.status, report.finished) == (7, False)
    assert report.begun == ("general", "dies", "call")


def test_a_child_that_hangs_is_ended(tmp_path):
    source = "import time\ndef f(): time.sleep(60)\n"
    plugin = make_plugin(tmp_path, "p-hangs", source, {"vllm.general_plugins": {"hangs": "p_hangs:f"}})
    environment = plugin_environment([plugin], VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS="hangs")
    for patience_s in (3.0, 30.0):
        # On a busy machine three seconds may be over before the plugin is called.
        report = boot_in_child("engine_core", environment, timeout_s=patience_s)
        if report.begun is not None:
            break
    assert report.status is None
    assert report.begun == ("general", "hangs", "call")
