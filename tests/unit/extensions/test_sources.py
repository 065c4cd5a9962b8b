"""Finding the files that code comes from."""

from __future__ import annotations

import importlib
import sys

import pytest

from hardpoint.extensions.sources import digest, digests, files_behind, files_of


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose class has its base in another one."""
    files = {
        "sp_base.py": "class Base: pass\n",
        "sp_model/__init__.py": "from sp_model.impl import Model\n",
        "sp_model/impl.py": "from sp_base import Base\nimport sp_model.flags\nclass Model(Base): pass\n",
        "sp_model/flags.py": "FLAG = 1\n",
        "sp_model/unused/other.py": "raise RuntimeError\n",
        "sp_space/part.py": "class Part: pass\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("sp_")]:
        del sys.modules[name]


def names(paths, folder):
    return [path.relative_to(folder).as_posix() for path in paths]


def test_the_files_of_a_package_are_all_below_it_and_nothing_is_imported(package):
    expected = ["sp_model/__init__.py", "sp_model/flags.py", "sp_model/impl.py", "sp_model/unused/other.py"]
    assert names(files_of("sp_model"), package) == expected
    assert names(files_of("sp_model.impl"), package) == ["sp_model/impl.py"]
    assert names(files_of("sp_base"), package) == ["sp_base.py"]
    assert names(files_of("sp_space"), package) == ["sp_space/part.py"]
    assert names(files_of("sp_space.part"), package) == ["sp_space/part.py"]
    assert not {name for name in sys.modules if name.startswith("sp_")}


@pytest.mark.parametrize("name", ["sp_nothing", "sp_model.nothing", "sp_base.nothing", "sys", "zipimport"])
def test_what_has_no_files_has_none(package, name):
    assert files_of(name) == []


def test_a_finder_that_raises_is_no_error(package, monkeypatch):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            raise RuntimeError("broken")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert files_of("sp_model") == []


def test_the_files_behind_a_class_are_those_of_its_bases_and_what_its_package_has_loaded(package):
    model = importlib.import_module("sp_model").Model
    expected = ["sp_base.py", "sp_model/__init__.py", "sp_model/flags.py", "sp_model/impl.py"]
    assert names(files_behind(model), package) == expected
    assert files_behind(dict) == []


def test_of_ours_only_the_modules_of_base_classes_count(package):
    from hardpoint.extensions.registry import Registry

    derived = type("Derived", (Registry,), {"__module__": "sp_base"})
    importlib.import_module("sp_base")
    assert {path.name for path in files_behind(derived)} == {"registry.py", "sp_base.py"}


def test_a_digest_tells_contents_apart(tmp_path):
    file = tmp_path / "a"
    file.write_text("1")
    before = digest(file)
    file.write_text("2")
    assert len({before, digest(file), digest(tmp_path / "missing")}) == 3
    assert digests([file]) == {str(file): digest(file)}
