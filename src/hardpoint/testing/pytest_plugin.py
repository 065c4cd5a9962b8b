"""Fixtures for tests of plugins: `pytest_plugins = ["hardpoint.testing.pytest_plugin"]` in the root conftest.py.

Loading it also lets `import vllm...` find Hardpoint, as it does in a server's processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hardpoint.extensions import loading, plugin_config, registry
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.patches import patches
from hardpoint.extensions.refs import load_ref
from hardpoint.testing import plugins
from hardpoint.testing.server import RunningServer


def pytest_configure(config: pytest.Config) -> None:
    """Answer `import vllm` in this process."""
    load_ref("hardpoint.compat:install")()


@pytest.fixture
def make_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., plugins.Plugin]:
    """Make a plugin from source text: `make_plugin(name, source, {group: {name: "module:attribute"}})`.

    This process and those that the test starts find it, after what was made before, without an installation.
    """
    made: list[str] = []

    def make(
        name: str,
        source: str | Mapping[str, str],
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        version: str = "1.0",
    ) -> plugins.Plugin:
        plugin = plugins.make_plugin(tmp_path / f"plugin-{len(made)}", name, source, entry_points, version)
        made.extend(plugin.paths)
        rest = [path for path in sys.path if path not in made]
        monkeypatch.setattr(sys, "path", [*made, *rest])
        before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in made]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*made, *before]))
        loading.reset()
        return plugin

    return make


@pytest.fixture
def isolated_registries() -> Iterator[None]:
    """A process that has loaded no plugin yet; whatever is registered, declared or recorded is undone at the end."""
    ledger.clear()
    loading.reset()
    with registry.isolated(), plugin_config.isolated():
        yield
    ledger.clear()
    patches.clear()
    loading.reset()


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of a tiny random Llama that any test may serve."""
    return load_ref("hardpoint.testing.tiny_llama:tiny_model")()


@pytest.fixture(scope="module")
def hardpoint_server(tiny_model: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start a server: `hardpoint_server("--port-flag", ..., plugins=[...], model=..., VLLM_PLUGINS="mine")`.

    Words are flags of `serve`, keywords in capitals environment variables. The same server is given again for
    the same arguments; all of a module's end with it.
    """
    running: dict[Any, RunningServer] = {}
    with ExitStack() as stack:

        def start(
            *flags: str, plugins: tuple[plugins.Plugin, ...] | list[plugins.Plugin] = (), model: Any = None, **env: str
        ) -> RunningServer:
            key = (flags, tuple(plugins), str(model), tuple(sorted(env.items())))
            if key not in running:
                running[key] = stack.enter_context(RunningServer(model or tiny_model, flags, plugins, env))
            return running[key]

        yield start
