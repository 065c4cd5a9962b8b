"""What importing costs: the set of modules that come along, in a fresh interpreter."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hardpoint

SOURCE = Path(hardpoint.__file__).parent
HEAVY = {"torch", "transformers"}
COUNT = """
import json, sys
before = set(sys.modules)
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def packages_after_importing(*modules: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", COUNT, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_below(package: str) -> list[str]:
    folder = SOURCE.joinpath(*package.split(".")[1:])
    found = pkgutil.walk_packages([str(folder)], prefix=f"{package}.")
    return [package, *(module.name for module in found)]


def test_the_extension_machinery_needs_the_standard_library_only():
    packages = packages_after_importing(*modules_below("hardpoint.extensions"))
    assert packages - set(sys.stdlib_module_names) <= {"hardpoint"}


@pytest.mark.parametrize(
    "package",
    [
        "hardpoint.front_end",
        "hardpoint.config",
        "hardpoint.links",
        "hardpoint.platforms",
        "hardpoint.types",
        "hardpoint.cli",
    ],
)
def test_the_front_end_side_imports_no_torch(package):
    assert not HEAVY & packages_after_importing(*modules_below(package))


@pytest.mark.parametrize(
    "module",
    [
        "hardpoint",
        "hardpoint.llm",
        "hardpoint.processes.front_end",
        "hardpoint.contracts.stat_logger",
        "hardpoint.contracts.endpoint_plugin",
        "hardpoint.contracts.engine_client",
        "hardpoint.contracts.io_processor",
        "hardpoint.contracts.logits_processor",
        "hardpoint.contracts.lora_resolver",
        "hardpoint.contracts.platform",
        "hardpoint.contracts.scheduler",
        "hardpoint.contracts.executor",
        "hardpoint.contracts.kv_cache",
    ],
)
def test_what_the_front_end_imports_brings_no_torch(module):
    assert not HEAVY & packages_after_importing(module)


def test_the_engine_core_imports_no_torch_of_its_own():
    assert not HEAVY & packages_after_importing(*modules_below("hardpoint.engine_core"))


@pytest.mark.parametrize("module", ["hardpoint", "hardpoint.cli.main", "hardpoint.cli.plugins"])
def test_the_command_line_starts_light(module):
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "numpy", "tokenizers", "huggingface_hub", "zmq"}
    assert not heavy & packages_after_importing(module)


def test_imports_point_down():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [str(linter), "--no-cache"], cwd=SOURCE.parent.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("role", ["front_end", "engine_core", "worker"])
def test_importing_a_process_does_not_choose_a_platform_yet(role):
    platforms = {"hardpoint.platforms.cpu", "hardpoint.platforms.cuda"}
    code = f"import sys, hardpoint.processes.{role}\nprint({platforms} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
