"""Other people's plugins, fetched as they are from the package index.

None of their code is kept here. A set of packages is installed once, without its dependencies (so that
nobody's requirements pull in another torch or a vLLM), into a folder of its own under the cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hardpoint.env import cache_root

# Plugin -> what it needs beside what the tests have anyway. Exact versions: what is tested is a given text.
NEEDS: dict[str, tuple[str, ...]] = {
    "vllm-sbw==1.0.0": ("sbw==1.0.0", "scipy==1.17.1"),
    "vllm-openttt==0.1.0": (),
    "pping-lang==0.1.0": ("duckdb==2.0.1", "nvidia-ml-py==13.615.71"),
    "vllm-hust-clm-lifecycle==0.1.1": (),
    "simulst==0.1.0": (),
    "traceloom-vllm-context==0.1.0": (),
    "raif-vllm==0.2.0": ("raif-format==0.6.0",),
    "vllm-spark2-5-plugin==0.1.0": (),
    "aleph-alpha-inference==1.0.0": (),
    "vllm-factory==0.2.1": (),
    "vllm-kvblockd==0.1.0": ("kvblockd==0.1.0", "blake3==1.0.11"),
    "qwerky-vllm-models==0.2.71": ("einops==0.8.2",),
}


def folder_of(plugin: str) -> Path:
    """The folder that holds a plugin, as `name==version`, and what it needs; for PYTHONPATH."""
    wanted = (plugin, *NEEDS[plugin])
    mark = hashlib.sha256("\n".join((*wanted, sys.version)).encode()).hexdigest()[:12]
    folder = cache_root() / "test-packages" / f"{plugin.partition('==')[0]}-{mark}"
    if not folder.is_dir():
        _fetch(wanted, folder)
    return folder


def python_path(*plugins: str) -> str:
    """The value of PYTHONPATH with which an interpreter finds these plugins."""
    return os.pathsep.join(str(folder_of(plugin)) for plugin in plugins)


def _fetch(wanted: tuple[str, ...], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        # Wheels only: nothing of theirs runs while it is installed.
        flags = ["--no-deps", "--only-binary", ":all:", "--no-compile", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(partial), *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        if done.returncode:
            pytest.fail(
                f"cannot fetch {', '.join(wanted)} from the package index, which the tests of other people's plugins "
                f"need: {done.stderr.strip()}",
                pytrace=False,
            )
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # another session may have been faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
