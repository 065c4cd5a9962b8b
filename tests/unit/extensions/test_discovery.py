import os

import pytest

from hardpoint.extensions.discovery import Allowlist, Found, catalogue
from hardpoint.extensions.points import group_row
from hardpoint.testing import make_plugin

GENERAL = group_row("general")


def names(group="vllm.general_plugins"):
    return [found.name for found in catalogue.group(group) if not found.built_in]


def test_an_installed_entry_point_is_found_with_its_distribution(install):
    install("one", "", {"vllm.general_plugins": {"one": "p_one.inner:Class.method"}}, version="1.2.3")
    found = next(f for f in catalogue.group("vllm.general_plugins") if f.name == "one")
    assert (found.distribution, found.version, found.built_in) == ("p-one", "1.2.3", False)
    assert (found.module, found.path) == ("p_one.inner", "Class.method")
    assert found.origin.label == "p-one 1.2.3, vllm.general_plugins: one"


def test_the_two_lora_resolvers_are_entries_like_others():
    built_in = [found.name for found in catalogue.group("vllm.general_plugins") if found.built_in]
    assert built_in == ["lora_filesystem_resolver", "lora_hf_hub_resolver"]


def test_installed_packages_are_read_once(install, monkeypatch):
    install("one", "", {"vllm.general_plugins": {"one": "p_one:f"}})
    reads = []
    original = catalogue.all.__globals__["_scan"]
    monkeypatch.setitem(catalogue.all.__globals__, "_scan", lambda: reads.append(1) or original())
    for _ in range(3):
        assert "one" in names()
        names("vllm.stat_logger_plugins")
    assert len(reads) == 1


def test_a_change_of_the_path_is_seen(install, tmp_path, monkeypatch):
    assert "late" not in names()
    plugin = make_plugin(tmp_path / "late", "p-late", "", {"vllm.general_plugins": {"late": "p_late:f"}})
    monkeypatch.syspath_prepend(str(plugin.folder))
    assert "late" in names()


def test_a_real_vllm_beside_us_keeps_its_entry_points(tmp_path, monkeypatch):
    make_plugin(tmp_path, "vllm", {}, {"vllm.general_plugins": {"lora_filesystem_resolver": "vllm.plugins.x:register"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [f for f in catalogue.group("vllm.general_plugins") if f.name == "lora_filesystem_resolver"]
    assert [f.built_in for f in found] == [True]


def test_a_group_outside_the_table_is_read_too(install):
    install("one", "", {"acme.group": {"x": "p_one:f"}})
    assert [found.name for found in catalogue.group("acme.group")] == ["x"]


def allow(monkeypatch, text, deny=None):
    if text is not None:
        monkeypatch.setenv("VLLM_PLUGINS", text)
    if deny is not None:
        monkeypatch.setenv("HARDPOINT_PLUGINS_DENY", deny)
    return Allowlist.read()


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        (None, {"a", "b", "b x"}),
        ("", set()),
        ("a,b", {"a", "b"}),
        ("a, b", {"a"}),
        ("a,", {"a"}),
        (" a", set()),
        ("A", set()),
        ("unknown", set()),
    ],
)
def test_names_are_compared_as_written(monkeypatch, text, loads):
    allowlist = allow(monkeypatch, text)
    assert {name for name in ("a", "b", "b x") if not allowlist.refusal(GENERAL, name)} == loads


def test_endpoints_load_only_when_named(monkeypatch):
    row = group_row("endpoints")
    assert "it is not set" in allow(monkeypatch, None).refusal(row, "a")
    assert allow(monkeypatch, "").refusal(row, "a") == "VLLM_PLUGINS is empty"
    assert allow(monkeypatch, "a").refusal(row, "a") == ""
    assert allow(monkeypatch, "b").refusal(row, "a") == "not named in VLLM_PLUGINS"


@pytest.mark.parametrize("text", [None, "", "other"])
def test_logits_processors_ignore_the_allowlist_but_not_the_deny_list(monkeypatch, text):
    row = group_row("logits_processors")
    assert allow(monkeypatch, text).refusal(row, "a") == ""
    assert allow(monkeypatch, text, deny="x, a").refusal(row, "a") == "named in HARDPOINT_PLUGINS_DENY"


def test_unset_and_empty_are_told_apart_in_words(monkeypatch):
    assert "is not set: all plugins load" in allow(monkeypatch, None).in_words()
    assert "is empty: no plugin loads" in allow(monkeypatch, "").in_words()
    assert "names 'a', ' b'" in allow(monkeypatch, "a, b").in_words()


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("toy_register,toy_endpoint", None),
        (None, None),
        ("", None),
        ("toy_registr", "did you mean 'toy_register'?"),
        ("toy_register, toy_endpoint", "has ' toy_endpoint', and names are compared with their spaces"),
        ("toy_register,", "has an empty part"),
        ("zzz", "no installed plugin has this name"),
    ],
)
def test_names_that_match_nothing_are_remarked(monkeypatch, text, remark):
    points = [Found("g1", "toy_register", "a:b", "d", "1"), Found("g2", "toy_endpoint", "a:b", "d", "1")]
    remarks = allow(monkeypatch, text).remarks({"g1": points[:1], "g2": points[1:]})
    assert len(remarks) == (remark is not None)
    assert all(remark in what for _, what in remarks)


def test_a_denied_name_that_matches_nothing_is_remarked(monkeypatch):
    remarks = allow(monkeypatch, None, deny="nope").remarks({})
    assert "HARDPOINT_PLUGINS_DENY names 'nope'" in remarks[0][1]


def test_the_environment_is_read_each_time(monkeypatch):
    assert allow(monkeypatch, None).names is None
    monkeypatch.setenv("VLLM_PLUGINS", "x")
    assert Allowlist.read().names == ("x",)
    assert "VLLM_PLUGINS" in os.environ
