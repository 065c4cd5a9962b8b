from __future__ import annotations

import sys

import pytest

from hardpoint.errors import PluginError
from hardpoint.extensions.boot import boot, load_logits_processors
from hardpoint.extensions.contract_versions import matches, versions
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.rows import Role

GENERAL = {"vllm.general_plugins": {"acme": "p_acme:register"}}
SOURCE = "HARDPOINT_CONTRACTS = NEEDS\ncalled = []\ndef register(): called.append(1)\n"


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("1.0", ">=1.0,<2", True),
        ("1.0", ">=1", True),
        ("1.4", "1.2", True),
        ("1.1", "1.2", False),
        ("2.0", "1.2", False),
        ("1.0", "1", True),
        ("2.0", "1", False),
        ("1.0", "1.0.0", True),
        ("1.3", "~=1.2", True),
        ("1.2.5", "~=1.2.3", True),
        ("1.3", "~=1.2.3", False),
        ("1.0", "==1", True),
        ("1.1", "==1.0", False),
        ("1.1", "!=1.0 , < 2", True),
        ("1.10", ">1.9", True),
        ("1.0", "<=1", True),
        ("1.0", ">1", False),
    ],
)
def test_ranges(version, wanted, fits):
    assert matches(version, wanted) is fits


@pytest.mark.parametrize("wanted", ["", "one", ">=", ">=1.x", "1,,2", None, 1.0])
def test_what_is_no_range(wanted):
    with pytest.raises(ValueError, match="write a range"):
        matches("1.0", wanted)


def test_every_built_contract_has_a_version():
    known = versions()
    assert {"stat_loggers", "models", "scheduler_cls", "check_and_update_config"} <= set(known)
    assert "kv_connectors" not in known
    assert all(matches(version, ">=1.0") for version in known.values())


@pytest.mark.parametrize("needs", ["{'models': '>=1.0,<2', 'stat_loggers': '1'}", "{}"])
def test_a_plugin_whose_needs_are_met_runs(install, platform, needs):
    install("acme", SOURCE.replace("NEEDS", needs), GENERAL)
    boot(Role.FRONT_END)
    assert sys.modules["p_acme"].called == [1]


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ("{'models': '>=2'}", "it needs version >=2 of the contract 'models', and here it is 1.0"),
        ("{'model': '1'}", "it needs the contract 'model', which does not exist here; did you mean 'models'"),
        ("{'kv_connectors': '1'}", "it needs the contract 'kv_connectors', which this version does not have yet"),
        ("{'models': 'new'}", "it states 'new' for the contract 'models'"),
        ("3", "HARDPOINT_CONTRACTS is 3, not a dict"),
    ],
)
def test_a_plugin_outside_its_range_is_refused_before_its_function_runs(install, platform, caplog, needs, why):
    install("acme", SOURCE.replace("NEEDS", needs), GENERAL)
    boot(Role.FRONT_END)
    assert sys.modules["p_acme"].called == []
    (entry,) = ledger.entries(kind="fault", key="general", name="acme")
    assert entry.detail.startswith("plugin 'acme' (p-acme 1.0) is refused: ")
    assert why in entry.detail
    assert "install a version of p-acme" in entry.fix


def test_the_package_speaks_for_its_modules(install, platform):
    files = {"p_acme/__init__.py": "HARDPOINT_CONTRACTS = {'models': '>=2'}\n", "p_acme/sub.py": SOURCE}
    files["p_acme/sub.py"] = "called = []\ndef register(): called.append(1)\n"
    install("acme", files, {"vllm.general_plugins": {"acme": "p_acme.sub:register"}})
    boot(Role.FRONT_END)
    assert sys.modules["p_acme.sub"].called == []


def test_the_row_says_what_a_refusal_does(install):
    source = "HARDPOINT_CONTRACTS = {'logits_processors': '>=9'}\nclass P: pass\n"
    install("acme", source, {"vllm.logits_processors": {"acme": "p_acme:P"}})
    with pytest.raises(RuntimeError, match="is refused: it needs version >=9") as caught:
        load_logits_processors()
    assert isinstance(caught.value, PluginError)
    assert caught.value.code == "plugin-contract"
