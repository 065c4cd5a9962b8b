"""Patches of our code are recorded with their author, and two of them in one place are told."""

from __future__ import annotations

import sys

import pytest

from hardpoint import compat
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.extensions import loading
from hardpoint.extensions.boot import boot, load_logits_processors
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.patches import Patches, patches
from hardpoint.extensions.rows import Role

SCHEDULE = "hardpoint.engine_core.scheduler.default.Scheduler.schedule"
LOADER = "hardpoint.worker.loaders.registry.get_model_loader"
PATCH_CLASS = """
def register():
    from vllm.v1.core.sched.scheduler import Scheduler
    before = Scheduler.schedule
    def schedule(self, *args, **kwargs):
        return before(self, *args, **kwargs)
    Scheduler.schedule = schedule
"""
WRAPPED = "import functools\n" + PATCH_CLASS.replace(
    "    def schedule", "    @functools.wraps(before)\n    def schedule"
)
PATCH_MODULE = """
def register():
    import vllm.model_executor.model_loader as loaders
    loaders.get_model_loader = lambda config: None
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Everything that is patched is put back."""
    from hardpoint.worker.loaders import registry

    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)
    monkeypatch.setattr(registry, "get_model_loader", registry.get_model_loader)
    patches.clear()
    yield
    patches.clear()
    compat.uninstall()


def general(install, name, source):
    install(name, source, {"vllm.general_plugins": {name: f"p_{name}:register"}})


def found(kind="override"):
    return {entry.name: entry for entry in ledger.entries(kind=kind, key="patches")}


@pytest.mark.parametrize("source", [PATCH_CLASS, WRAPPED], ids=["plain", "functools.wraps"])
def test_a_method_that_a_plugin_replaces_is_recorded(install, platform, source):
    general(install, "one", source)
    boot(Role.ENGINE_CORE)
    entry = found()[SCHEDULE]
    assert entry.origin.label == "p-one 1.0, vllm.general_plugins: one"
    assert "is now p_one.register.<locals>.schedule" in entry.detail
    assert found("warn") == {}


def test_a_name_of_a_module_that_a_plugin_replaces_is_recorded(install, platform):
    general(install, "one", PATCH_MODULE)
    boot(Role.ENGINE_CORE)
    assert found()[LOADER].origin.distribution == "p-one"


@pytest.mark.parametrize(("source", "path"), [(PATCH_CLASS, SCHEDULE), (PATCH_MODULE, LOADER)])
def test_two_authors_of_one_attribute_are_told(install, platform, caplog, source, path):
    general(install, "one", source)
    general(install, "two", source)
    boot(Role.ENGINE_CORE)
    warning = found("warn")[path]
    assert warning.detail.startswith(f"{path} is patched by two plugins: first by p-one 1.0")
    assert "then by p-two 1.0" in warning.detail
    assert warning.fix


def test_what_is_patched_later_is_found_before_the_ledger_leaves(install, platform):
    late = PATCH_CLASS.replace("def register", "def later") + "\ndef register():\n    pass\n"
    general(install, "one", late)
    boot(Role.ENGINE_CORE)
    assert found() == {}
    sys.modules["p_one"].later()
    exported = [entry for entry in ledger.export() if entry["key"] == "patches"]
    assert [(entry["name"], entry["origin"]["distribution"]) for entry in exported] == [(SCHEDULE, "p-one")]


class Ours:
    """Stands for a class of ours."""

    limit = 1

    def run(self):
        return 1


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(Ours, "__module__", "hardpoint.fake")
    watcher = Patches()
    watcher.watch(Ours)
    return watcher


def test_every_kind_of_change_is_seen_once(own, monkeypatch):
    monkeypatch.setattr(Ours, "run", lambda self: 2)
    monkeypatch.setattr(Ours, "extra", 5, raising=False)
    monkeypatch.delattr(Ours, "limit")
    own.look()
    own.look()
    details = [entry.detail for entry in ledger.entries(key="patches")]
    assert len(details) == 3
    assert any(detail == "hardpoint.fake.Ours.limit is now gone" for detail in details)
    assert any(detail == "hardpoint.fake.Ours.extra is now 5" for detail in details)


def test_what_is_put_back_counts_as_untouched(own):
    before = Ours.limit
    for value in (2, before):
        Ours.limit = value
        own.look()
    assert len(ledger.entries(key="patches")) == 1


def test_classes_of_others_are_not_watched():
    theirs = type("Theirs", (), {"__module__": "elsewhere"})
    watcher = Patches()
    for value in (int, Ours(), theirs):
        watcher.watch(value)
    theirs.extra = 1
    watcher.look()
    assert ledger.entries(key="patches") == []


FAKE_TORCH = """
import sys, types
def bring(cuda):
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: cuda)
    sys.modules["torch"] = torch
"""


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.mark.parametrize(
    ("role", "cuda", "told"),
    [(Role.FRONT_END, True, True), (Role.FRONT_END, False, False), (Role.FRONT_END | Role.WORKER, True, False)],
)
def test_a_device_touched_in_the_front_end_is_told_with_the_plugin(install, platform, no_torch, role, cuda, told):
    general(install, "one", FAKE_TORCH + f"def register(): bring({cuda})\n")
    boot(role)
    (call,) = ledger.entries(kind="call", name="one")
    assert call.detail == "it imports torch"
    warnings = [entry.detail for entry in ledger.entries(kind="warn", key="general", name="one")]
    expected = "the call of plugin 'one' has initialised CUDA in the front end, which stays free of devices"
    assert warnings == ([expected] if told else [])


def test_an_import_that_brings_torch_is_noted(install, platform, no_torch):
    general(install, "one", FAKE_TORCH + "bring(False)\ndef register(): pass\n")
    boot(Role.FRONT_END)
    (load,) = ledger.entries(kind="load", name="one")
    assert load.detail == "p_one:register; it imports torch"
    loading.reset()
    assert load_logits_processors() == []
