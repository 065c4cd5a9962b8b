from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from hardpoint.extensions import loading, registry
from hardpoint.extensions.ledger import ledger
from hardpoint.testing import Plugin, make_plugin

VARIABLES = ("VLLM_PLUGINS", "HARDPOINT_PLUGINS_DENY", "HARDPOINT_PLUGIN_POLICY", "VLLM_TARGET_DEVICE")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded nothing yet, and leaves nothing behind."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    before = set(sys.modules)
    ledger.clear()
    loading.reset()
    with registry.isolated():
        yield
    ledger.clear()
    loading.reset()
    for name in set(sys.modules) - before:
        if name.startswith("p_"):
            del sys.modules[name]


@pytest.fixture
def install(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugin]:
    """Make a plugin `p-NAME` and let this process find it, after those made before."""
    made: list[str] = []

    def make(name: str, source, entry_points, version: str = "1.0") -> Plugin:
        plugin = make_plugin(tmp_path / f"{len(made)}", f"p-{name}", source, entry_points, version)
        monkeypatch.setattr(sys, "path", [*made, str(plugin.folder), *[p for p in sys.path if p not in made]])
        made.append(str(plugin.folder))
        loading.reset()
        return plugin

    return make


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boot without asking for the platform of this machine."""
    monkeypatch.setattr("hardpoint.extensions.boot._PLATFORM", "hardpoint.extensions.rows:Role")
