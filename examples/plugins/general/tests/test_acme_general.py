from pathlib import Path

import pytest
from acme_general import Settings, register

from hardpoint.extensions.plugin_config import PluginConfigError, deliver, get_plugin_config
from hardpoint.testing import boot_in_child, check_project, project_plugin

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_general": register}


@pytest.mark.parametrize("role", ["front_end", "engine_core", "worker", "inspector"])
def test_every_process_says_what_the_user_wants(tmp_path, role):
    environment = project_plugin(PROJECT, tmp_path).environment(
        HARDPOINT_PLUGIN_CONFIG='{"acme": {"greeting": "hi", "times": 2}}', VLLM_TARGET_DEVICE="cpu"
    )
    report = boot_in_child(role, environment)
    assert report.status == 0, report.output
    assert "acme says: hi hi" in report.output


def test_a_wrong_setting_is_refused(isolated_registries):
    deliver({"acme": {"times": "twice"}})
    with pytest.raises(PluginConfigError, match=r"acme\.times is 'twice': expected a whole number"):
        get_plugin_config("acme", Settings)
