from __future__ import annotations

import importlib.metadata

import pytest

from hardpoint.testing import ContractFailure, boot_in_child, check_project, project_plugin

SOURCE = """
from hardpoint.contracts.stat_logger import StatLoggerBase
HARDPOINT_CONTRACTS = {"stat_loggers": "1"}
class Log(StatLoggerBase): pass
def register(): pass
def needs(argument): pass
async def later(): pass
number = 3
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make a project whose one entry point is as given."""
    (tmp_path / "acme_project.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(group="vllm.general_plugins", name="acme", ref="acme_project:register"):
        text = (
            f'[project]\nname = "acme-project"\nversion = "0.3"\n[project.entry-points."{group}"]\n"{name}" = "{ref}"\n'
        )
        (tmp_path / "pyproject.toml").write_text(text)
        return tmp_path

    return make


def test_good_ones(project):
    assert check_project(project())["acme"].__name__ == "register"
    assert check_project(str(project("vllm.stat_logger_plugins", ref="acme_project:Log")))["acme"].__name__ == "Log"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"group": "console_scripts"}, "publishes no entry point in a group of ours"),
        ({"group": "vllm.general_plugin"}, "no group 'vllm.general_plugin'; did you mean 'vllm.general_plugins'"),
        ({"name": "a,b"}, "cannot be written into VLLM_PLUGINS"),
        ({"ref": "acme_project:missing"}, "importing it raises RefAttributeError"),
        ({"ref": "no_such_module:x"}, "importing it raises RefImportError"),
        ({"ref": "acme_project:number"}, "cannot be called"),
        ({"ref": "acme_project:needs"}, "cannot be called as the host calls it"),
        ({"ref": "acme_project:later"}, "is a coroutine function"),
        ({"group": "vllm.stat_logger_plugins"}, "not a class of the contract"),
        ({"group": "vllm.logits_processors"}, "not a class of the contract"),
    ],
)
def test_bad_ones(project, changes, what):
    with pytest.raises(ContractFailure, match=what):
        check_project(project(**changes))


def test_a_contract_that_is_not_met(project, monkeypatch):
    folder = project()
    check_project(folder)
    monkeypatch.setattr("acme_project.HARDPOINT_CONTRACTS", {"stat_loggers": ">=9"})
    with pytest.raises(ContractFailure, match="needs version >=9"):
        check_project(folder)


def test_a_project_is_found_without_being_installed(project, tmp_path):
    plugin = project_plugin(project(), tmp_path / "meta")
    (found,) = importlib.metadata.distributions(name="acme-project", path=[str(plugin.folder)])
    assert (found.version, plugin.version) == ("0.3", "0.3")
    report = boot_in_child("engine_core", plugin.environment(VLLM_TARGET_DEVICE="cpu"))
    (call,) = report.find("call", "acme")
    assert call.origin.label == "acme-project 0.3, vllm.general_plugins: acme"


def test_sources_may_lie_in_src(project, tmp_path):
    folder = project()
    (folder / "src").mkdir()
    (folder / "acme_project.py").rename(folder / "src" / "acme_project.py")
    plugin = project_plugin(folder, tmp_path / "meta")
    assert boot_in_child("inspector", plugin.environment(VLLM_TARGET_DEVICE="cpu")).find("call", "acme")
