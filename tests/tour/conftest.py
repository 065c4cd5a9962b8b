"""A fresh environment with the `vllm` command, in which nothing that is installed here is installed again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Environment:
    """A virtual environment; `run` runs one of its programs to its end."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def variables(self) -> dict[str, str]:
        """The process environment after `source bin/activate`."""
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=cwd,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def install(self, project: Path, *flags: str) -> None:
        """`pip install` a copy of a folder, which a build would write into, without asking an index for anything."""
        copy = Path(shutil.copytree(project, Path(tempfile.mkdtemp(dir=self.folder)) / project.name))
        self.run("python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *flags, str(copy))


@pytest.fixture(scope="session")
def make_environment(tmp_path_factory):
    """Make an environment that sees what is installed here, and has the `vllm` command."""

    def make() -> Environment:
        folder = tmp_path_factory.mktemp("fresh") / "venv"
        venv.create(folder, with_pip=False, symlinks=True)
        ours = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        theirs = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (theirs / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
        environment = Environment(folder)
        environment.run("python", "-m", "hardpoint", "alias", "install")
        return environment

    return make
