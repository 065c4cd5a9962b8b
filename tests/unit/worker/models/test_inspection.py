"""What is remembered of plugins' model classes, and when it is asked for again."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest

from hardpoint.errors import ConfigError, StartError
from hardpoint.extensions.ledger import Origin, ledger
from hardpoint.extensions.registry import Entry, isolated, registry
from hardpoint.extensions.sources import digests
from hardpoint.types.messages import Inspected
from hardpoint.types.model_info import ModelInfo
from hardpoint.worker.models import inspection
from hardpoint.worker.models.inspection import inspect_entry

PLUGIN = Origin(distribution="p-model", version="1.0", group="vllm.general_plugins", entry_point="p")


class Asking:
    """Stands for the child: counts how often it is asked, and answers with what `info` holds."""

    def __init__(self, sources):
        self.count, self.sources = 0, sources
        self.info = ModelInfo("Toy", is_text_generation_model=True)
        self.error = None

    def __call__(self, ref):
        self.count += 1
        if self.error is not None:
            raise self.error
        mine = ledger.record("register", "models", "Toy").to_dict()
        entries = [{**mine, "pid": 1}]
        return Inspected(self.info.to_dict(), "pi_model.impl:Toy", ["it lacks x"], digests(self.sources), entries)


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "pi_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from pi_model.impl import Toy\n")
    (folder / "impl.py").write_text("1\n")
    (tmp_path / "site" / "pi_base.py").write_text("1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


@pytest.fixture
def child(package, tmp_path, monkeypatch):
    monkeypatch.setenv("HARDPOINT_CACHE", str(tmp_path / "cache"))
    asking = Asking([package / "impl.py", package.parent / "pi_base.py"])
    monkeypatch.setattr(inspection, "inspect_in_child", asking)
    return asking


def entry(ref="pi_model:Toy", origin=PLUGIN):
    return Entry("Toy", origin, ref)


def cache_files(tmp_path):
    return sorted((tmp_path / "cache" / "modelinfos").iterdir())


def test_a_class_is_asked_about_once(child, tmp_path):
    first, second = inspect_entry(entry()), inspect_entry(entry())
    assert first == second
    assert (first.info, first.path, first.remarks) == (child.info, "pi_model.impl:Toy", ("it lacks x",))
    assert child.count == 1
    assert [file.suffix for file in cache_files(tmp_path)] == [".json"]
    details = [e.detail for e in ledger.entries(kind="inspect")[-2:]]
    assert details[0].startswith("pi_model.impl:Toy declares is_text_generation_model; asked in ")
    assert details[1].endswith("; as remembered")
    assert "pi_model" not in sys.modules


@pytest.mark.parametrize("edited", ["impl.py", "__init__.py", "../pi_base.py", "new.py"])
def test_a_change_in_any_file_it_depends_on_asks_again(child, package, edited):
    inspect_entry(entry())
    child.info = ModelInfo("Toy", is_pooling_model=True)
    (package / edited).write_text("2\n")
    assert inspect_entry(entry()).info.is_pooling_model
    assert child.count == 2
    inspect_entry(entry())
    assert child.count == 2


def test_a_missing_base_file_asks_again(child, package):
    inspect_entry(entry())
    (package.parent / "pi_base.py").unlink()
    inspect_entry(entry())
    assert child.count == 2


def test_another_version_of_the_package_or_of_ours_or_another_plugin_asks_again(child, monkeypatch):
    inspect_entry(entry())
    upgraded = Origin(distribution="p-model", version="1.1", group="vllm.general_plugins", entry_point="p")
    inspect_entry(entry(origin=upgraded))
    assert child.count == 2
    monkeypatch.setattr(inspection, "__version__", "another")
    inspect_entry(entry(origin=upgraded))
    assert child.count == 3
    monkeypatch.setattr(inspection, "loaded_plugins", lambda: [("q", "q-plugin", "1")])
    inspect_entry(entry(origin=upgraded))
    assert child.count == 4


def test_two_classes_of_one_module_do_not_share_an_answer(child):
    inspect_entry(entry())
    inspect_entry(entry("pi_model:Other"))
    assert child.count == 2


def broken(file, how):
    if how == "a folder":
        file.unlink()
        file.mkdir()
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "huge":
        os.truncate(file, 1 << 30)
    else:
        file.write_bytes(how)


FIELDS = {"key": "k", "sources": {}, "path": "p:q", "info": {"architecture": "X"}, "remarks": []}


@pytest.mark.parametrize(
    "how",
    [b"{", b"", b"[]", b"\xff\xfe", b'{"key": 1}', json.dumps(FIELDS).encode(), "a folder", "a pipe", "huge"],
    ids=str,
)
def test_a_broken_record_is_one_that_is_not_there(child, tmp_path, how):
    inspect_entry(entry())
    (file,) = cache_files(tmp_path)
    broken(file, how)
    assert inspect_entry(entry()).info == child.info
    assert child.count == 2


def test_a_record_whose_facts_have_another_form_is_one_that_is_not_there(child, tmp_path):
    inspect_entry(entry())
    (file,) = cache_files(tmp_path)
    record = json.loads(file.read_text())
    for info in ({"architecture": "X"}, {**record["info"], "supports_pp": "perhaps"}):
        file.write_text(json.dumps({**record, "info": info}))
        assert inspect_entry(entry()).info == child.info
    assert child.count == 3


@pytest.mark.parametrize("how", ["file for folder", "unwritable", "no home"])
def test_a_cache_that_cannot_be_written_costs_time_only(child, tmp_path, monkeypatch, how):
    if how == "file for folder":
        (tmp_path / "cache").write_text("in the way")
    elif how == "unwritable":
        # Root may write anywhere, so the system is made to refuse.
        monkeypatch.setattr(inspection.tempfile, "mkstemp", refuse)
    else:
        monkeypatch.setattr(inspection, "cache_root", no_home)
    assert inspect_entry(entry()).info == child.info
    assert inspect_entry(entry()).info == child.info
    assert child.count == 2


def refuse(**options):
    raise PermissionError(13, "Permission denied")


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_a_write_that_fails_leaves_nothing_behind(child, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection.os, "replace", lambda *paths: refuse())
    inspect_entry(entry())
    assert cache_files(tmp_path) == []


def test_several_at_once_all_get_the_answer(child, tmp_path):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(inspect_entry(entry()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len(set(answers)) == 1
    assert len(cache_files(tmp_path)) == 1


def test_without_files_the_version_decides(child):
    inspect_entry(entry("pi_gone:Toy"))
    inspect_entry(entry("pi_gone:Toy"))
    assert child.count == 1
    nobody = Origin(module="script")
    inspect_entry(entry("pi_gone:Toy", nobody))
    inspect_entry(entry("pi_gone:Toy", nobody))
    assert child.count == 3


def test_a_failure_is_not_remembered(child):
    child.error = StartError("no")
    for _ in range(2):
        with pytest.raises(StartError):
            inspect_entry(entry())
    child.error = None
    inspect_entry(entry())
    assert child.count == 3


def test_what_the_child_registered_is_in_the_ledger(child):
    before = len(ledger.entries(pid=1, kind="register"))
    inspect_entry(entry())
    inspect_entry(entry())
    assert [e.name for e in ledger.entries(pid=1, kind="register")[before:]] == ["Toy"]


def test_a_class_that_is_at_hand_is_looked_at_here(child):
    from hardpoint.worker.models.llama import LlamaForCausalLM

    with isolated():
        given = registry("models").register("Toy", type("Toy", (LlamaForCausalLM,), {}))
        assert inspect_entry(given).info.supports_pp
    assert child.count == 0


def test_a_class_of_the_start_script_is_refused(child):
    with pytest.raises(ConfigError, match="in the start script, where another process cannot import it"):
        inspect_entry(entry("__main__:Toy"))
