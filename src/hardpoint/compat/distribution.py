"""Put the tiny distribution named `vllm` into an environment, and take it out again.

Its sources lie in `alias/` of the repository and travel inside our wheel. The wheel of the
alias is packed here, so that no build tool and no network is needed; pip installs it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hardpoint.errors import HardpointError

_MARK = "+hardpoint"
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Installed:
    """A distribution named vllm in this environment."""

    version: str
    is_ours: bool
    location: str


def sources() -> Path:
    """The folder with the alias's pyproject.toml: beside us in a wheel, in the repository otherwise."""
    for folder in (_HERE / "alias_sources", _HERE.parents[2] / "alias"):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise HardpointError(
        "the sources of the vllm alias are missing from this installation",
        code="alias-sources",
        fix="install Hardpoint again",
    )


def installed() -> Installed | None:
    """What `vllm` is installed here, apart from the alias our own processes see."""
    for found in importlib.metadata.MetadataPathFinder.find_distributions(
        importlib.metadata.DistributionFinder.Context(name="vllm")
    ):
        return Installed(found.version, found.version.endswith(_MARK), str(found.locate_file("")))
    return None


def install() -> Installed:
    """Install the alias with pip; refuse where a real vLLM is."""
    there = installed()
    if there is not None and not there.is_ours:
        raise HardpointError(
            f"vLLM {there.version} is installed in {there.location}",
            code="alias-real-vllm",
            fix="inside Hardpoint's own processes the alias works beside it without being installed; for other "
            "programs use an environment without vLLM",
        )
    with tempfile.TemporaryDirectory() as folder:
        wheel = pack(sources(), Path(folder))
        _pip("install", "--no-deps", "--force-reinstall", "--no-index", str(wheel))
    now = installed()
    assert now is not None
    return now


def remove() -> bool:
    """Uninstall the alias; False when it was not there. A real vLLM is never touched."""
    there = installed()
    if there is None or not there.is_ours:
        return False
    _pip("uninstall", "--yes", "vllm")
    return True


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise HardpointError(
            f"pip {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}",
            code="alias-pip",
            fix="see that this environment may be written to and has pip",
        )


def pack(source: Path, target: Path) -> Path:
    """Write the alias's wheel into `target` and return its path (binary distribution format 1.0)."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    scripts = "".join(f"{command} = {ref}\n" for command, ref in project["scripts"].items())
    requires = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
    files = {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((source / name).rglob("*.py"))
    }
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {project['description']}\n"
        f"Requires-Python: {project['requires-python']}\n{requires}"
    )
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: hardpoint\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}"
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = target / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
