import logging

import pytest

from hardpoint.errors import PluginError, StartError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.platform_choice import UNSPECIFIED, resolve_platform_cls_qualname

SOURCE = """
calls = []
class Mine: pass
def active():
    calls.append(1)
    return "p_plat.Mine"
def inactive(): return None
def raises(): raise ModuleNotFoundError("No module named 'npu'")
def exits(): raise SystemExit(1)
def number(): return 7
def empty(): return ""
def gone(): return "p_plat.Gone"
"""
BUILT_IN = {"cuda": lambda: None, "cpu": lambda: "hardpoint.platforms.cpu.CpuPlatform"}
CPU = "hardpoint.platforms.cpu.CpuPlatform"


def plugin(install, attribute, name="mine"):
    install("plat", SOURCE, {"vllm.platform_plugins": {name: f"p_plat:{attribute}"}})


def test_a_built_in_platform_is_used_without_plugins():
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    assert resolve_platform_cls_qualname({"cuda": lambda: None}) == UNSPECIFIED


def test_a_built_in_detector_that_raises_is_inactive():
    assert resolve_platform_cls_qualname({"cuda": lambda: 1 / 0, "cpu": lambda: CPU}) == CPU


def test_two_built_in_platforms_are_an_error():
    with pytest.raises(StartError, match="a, b"):
        resolve_platform_cls_qualname({"a": lambda: "x.A", "b": lambda: "x.B"})


def test_an_active_plugin_wins_and_is_asked_once(install, caplog):
    caplog.set_level(logging.INFO, "hardpoint")
    plugin(install, "active")
    assert resolve_platform_cls_qualname(BUILT_IN) == "p_plat.Mine"
    import p_plat

    assert p_plat.calls == [1]
    assert "platform plugin 'mine' (p-plat 1.0) is activated" in caplog.text


def test_an_inactive_plugin_is_quiet(install, caplog):
    plugin(install, "inactive")
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_plugin_named_like_a_built_in_platform_counts_for_itself(install):
    plugin(install, "inactive", name="cpu")
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU


@pytest.mark.parametrize(("attribute", "said"), [("raises", "No module named 'npu'"), ("exits", "sys.exit(1)")])
def test_a_detector_that_fails_is_told_with_what_is_used_instead(install, caplog, attribute, said):
    plugin(install, attribute)
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said in warning
    assert f"{CPU} is used instead" in warning
    assert "p-plat 1.0" in warning


@pytest.mark.parametrize("attribute", ["raises", "exits"])
def test_a_detector_that_fails_stops_when_it_was_asked_for_by_name(install, monkeypatch, attribute):
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    plugin(install, attribute)
    with pytest.raises(PluginError, match="platform plugin 'mine': its detector failed"):
        resolve_platform_cls_qualname(BUILT_IN)


def test_an_import_that_fails_is_skipped_with_a_warning(install, caplog):
    install("plat", "import npu_runtime\n", {"vllm.platform_plugins": {"mine": "p_plat:f"}})
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.levelno == logging.WARNING
    assert "npu_runtime" in record.getMessage()


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("number", "gave int 7, not a class path"),
        ("empty", "gave '', which cannot be imported"),
        ("gone", "gave 'p_plat.Gone', which cannot be imported"),
    ],
)
def test_an_unusable_answer_stops_and_names_the_plugin(install, attribute, said):
    plugin(install, attribute)
    with pytest.raises(PluginError) as caught:
        resolve_platform_cls_qualname(BUILT_IN)
    assert said in str(caught.value)
    assert "p-plat 1.0" in str(caught.value)


def test_two_active_plugins_stop_and_name_both_distributions(install):
    install("plat", SOURCE, {"vllm.platform_plugins": {"one": "p_plat:active"}})
    install("too", "def active(): return 'p_too.X'", {"vllm.platform_plugins": {"two": "p_too:active"}}, version="3")
    with pytest.raises(RuntimeError, match=r"one \(p-plat 1.0\) and two \(p-too 3\)"):
        resolve_platform_cls_qualname(BUILT_IN)


def test_a_filtered_platform_leaves_the_built_in_one(install, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    plugin(install, "active")
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    assert ledger.entries(kind="skip", key="platforms")[0].detail == "not named in VLLM_PLUGINS"


def test_a_forced_cpu_asks_no_plugin_and_says_so(install, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")
    plugin(install, "active")
    assert resolve_platform_cls_qualname(BUILT_IN) == CPU
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "mine (p-plat 1.0)" in warning
    caplog.clear()
    monkeypatch.setenv("VLLM_PLUGINS", "")
    resolve_platform_cls_qualname(BUILT_IN)
    assert caplog.records == []


def test_registrations_of_a_failed_detector_are_undone(install):
    source = "def f():\n    from hardpoint.extensions.registry import registry\n"
    source += "    registry('models').register('Half', 'a:B')\n    raise ValueError\n"
    install("plat", source, {"vllm.platform_plugins": {"mine": "p_plat:f"}})
    resolve_platform_cls_qualname(BUILT_IN)
    assert ledger.entries(kind="rollback", name="Half")
