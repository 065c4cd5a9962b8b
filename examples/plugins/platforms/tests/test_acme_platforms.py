from pathlib import Path

from acme_platforms import detect
from acme_platforms.platform import AcmePlatform

from hardpoint import platforms
from hardpoint.testing import boot_in_child, check_platform, check_project, project_plugin, tiny_vllm_config

PROJECT = Path(__file__).parent.parent


def test_its_entry_point(monkeypatch):
    assert check_project(PROJECT) == {"acme_platforms": detect}
    assert detect() is None
    monkeypatch.setenv("ACME_PLATFORM", "1")
    assert detect() == "acme_platforms.platform.AcmePlatform"


def test_it_keeps_the_contract():
    check_platform(AcmePlatform, serves=True)


def test_blocks_are_larger_unless_the_user_says_otherwise():
    platforms.set_current_platform(AcmePlatform)
    try:
        assert tiny_vllm_config().cache_config.block_size == 32
        assert tiny_vllm_config(block_size=8).cache_config.block_size == 8
    finally:
        platforms.reset_current_platform()


def test_it_is_activated_where_it_applies(tmp_path):
    plugin = project_plugin(PROJECT, tmp_path)
    report = boot_in_child("worker", plugin.environment(ACME_PLATFORM="1"), groups=[])
    (entry,) = report.find("override", "acme_platforms", "platforms")
    assert entry.detail == "platform acme_platforms.platform.AcmePlatform"
