"""The fixtures for plugin authors, as their own test suites use them."""

from __future__ import annotations

import subprocess
import sys

SUITE = '''
import importlib.metadata, os, subprocess, sys
import pytest
from hardpoint.extensions import registry
from hardpoint.extensions.boot import boot
from hardpoint.extensions.plugin_config import declare, declared
from hardpoint.extensions.rows import Role

SOURCE = """
from vllm import ModelRegistry
def register():
    ModelRegistry.register_model("AcmeForCausalLM", "acme:Net")
"""
POINTS = {"vllm.general_plugins": {"acme": "acme:register"}}
ENDPOINT = """
class Hello:
    name, required_tasks = "hello", None
    def attach_router(self, app):
        @app.get("/v1/hello")
        async def hello(): return {"hello": "world"}
    async def init_state(self, engine_client, state, args): pass
"""

def test_vllm_is_importable():
    from vllm.v1.metrics.loggers import StatLoggerBase
    assert StatLoggerBase.__module__ == "hardpoint.contracts.stat_logger"

def test_a_plugin_from_text(make_plugin, isolated_registries):
    make_plugin("acme", SOURCE, POINTS)
    make_plugin("second", "x = 1", {})
    boot(Role.WORKER)
    assert "AcmeForCausalLM" in registry.registry("models").names()
    assert [d.version for d in importlib.metadata.distributions(name="acme")] == ["1.0"]
    done = subprocess.run([sys.executable, "-c", "import second"], check=False)
    assert done.returncode == 0

def test_nothing_is_left():
    assert "AcmeForCausalLM" not in registry.registry("models").names()
    assert declared() == []

def test_a_server(make_plugin, hardpoint_server, tiny_model):
    plugin = make_plugin("greeter", ENDPOINT, {"vllm.endpoint_plugins": {"hello": "greeter:Hello"}})
    server = hardpoint_server("--max-model-len", "64", plugins=[plugin], VLLM_PLUGINS="hello")
    assert server.get("/v1/hello") == (200, {"hello": "world"})
    assert server.get("/v1/nothing").status == 404
    assert len(server.complete([1, 2, 3], 4)["choices"][0]["text"]) > 0
    with pytest.raises(RuntimeError, match="status 400"):
        server.complete("x", max_tokens=-1)
    (load,) = server.ledger(kind="load", name="hello")
    assert load["origin"]["distribution"] == "greeter"
    assert "ready" in server.log()
    assert hardpoint_server("--max-model-len", "64", plugins=[plugin], VLLM_PLUGINS="hello") is server

def test_a_server_that_does_not_start(hardpoint_server):
    with pytest.raises(RuntimeError, match="max_model_len is 99999"):
        hardpoint_server("--max-model-len", "99999")
'''


def test_a_suite_of_an_author(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["hardpoint.testing.pytest_plugin"]\n')
    (tmp_path / "test_it.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "5 passed" in done.stdout
