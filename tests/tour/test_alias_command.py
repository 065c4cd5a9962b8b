"""`hardpoint alias` in an environment of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def environment(make_environment):
    return make_environment()


def alias(environment, action: str) -> subprocess.CompletedProcess[str]:
    command = [environment.bin / "python", "-m", "hardpoint", "alias", action]
    return subprocess.run(command, env=environment.variables, capture_output=True, text=True, check=False, timeout=200)


def test_a_program_that_is_not_ours_finds_our_names(environment):
    source = (
        "import importlib.metadata, vllm\n"
        "from vllm import LLM, SamplingParams\n"
        "print(vllm.__version__, importlib.metadata.version('vllm'), SamplingParams.__module__)\n"
    )
    shown = environment.run("python", "-c", source).stdout.split()
    assert shown[0].startswith("0.32.0")
    assert shown[1].startswith("0.32.0")
    assert shown[2].startswith("hardpoint.")
    assert "usage: hardpoint COMMAND" in environment.run("vllm", "--help").stdout


def test_it_says_what_is_there_and_can_be_taken_out(environment):
    assert "the alias is installed: vllm 0.32.0+hardpoint" in alias(environment, "status").stdout
    assert alias(environment, "remove").stdout == "removed\n"
    assert "no vllm is installed" in alias(environment, "status").stdout
    assert alias(environment, "remove").stdout == "the alias was not installed\n"
    assert not (environment.bin / "vllm").exists()
    done = alias(environment, "install")
    assert done.returncode == 0, done.stderr
    assert (environment.bin / "vllm").exists()


def test_a_real_vllm_is_left_alone(make_environment):
    environment = make_environment()
    alias(environment, "remove")
    [site] = environment.folder.glob(f"lib/python{sys.version_info.major}.*/site-packages")
    info = site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    for action, code in (("install", 1), ("status", 0), ("remove", 0)):
        done = alias(environment, action)
        assert done.returncode == code, done.stderr
        assert ("vLLM 0.32.0 is installed in" in done.stdout + done.stderr) == (action != "remove")
    assert info.is_dir()
