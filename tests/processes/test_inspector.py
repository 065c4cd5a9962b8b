"""The inspector process: what a model class declares, without importing it here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hardpoint.errors import StartError
from hardpoint.extensions.sources import digest
from hardpoint.links.inspection import inspect_in_child
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO, ModelInfo

MODEL = """
import os, signal, sys
from hardpoint.worker.models.llama import LlamaForCausalLM


class OddForCausalLM(LlamaForCausalLM):
    has_inner_state = True

def function():
    pass

print("driver found")
print("driver too old", file=sys.stderr)
if os.environ.get("ODD_MODE") == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("ODD_MODE") == "raise":
    raise OSError("no driver")
"""


@pytest.fixture
def odd(tmp_path, monkeypatch):
    (tmp_path / "odd_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_built_in_class_declares_what_the_table_says():
    report = inspect_in_child("hardpoint.worker.models.llama:LlamaForCausalLM")
    assert ModelInfo.from_dict(report.info) == BUILT_IN_MODEL_INFO["LlamaForCausalLM"]
    assert {entry["role"] for entry in report.ledger} == {"inspector"}


def test_a_class_of_another_package_is_inspected_but_not_imported_here(odd):
    report = inspect_in_child("odd_models:OddForCausalLM")
    assert report.info["architecture"] == "OddForCausalLM"
    assert report.info["is_text_generation_model"]
    assert report.info["has_inner_state"] is True
    assert "odd_models" not in sys.modules


@pytest.mark.parametrize(
    ("ref", "mode", "what"),
    [
        ("odd_models:OddForCausalLM", "raise", "OSError: no driver"),
        ("odd_models:OddForCausalLM", "die", "was killed by SIGKILL"),
        ("odd_models:Missing", "", "Missing"),
        ("odd_models:function", "", "not a class"),
    ],
)
def test_what_goes_wrong_is_told_and_ends_nothing_here(odd, monkeypatch, ref, mode, what):
    monkeypatch.setenv("ODD_MODE", mode)
    with pytest.raises((StartError, ValueError, ImportError), match=what) as caught:
        inspect_in_child(ref)
    lines = caught.value.child_output.splitlines()
    assert all(re.match(r"\[inspector \d+\] .", line) for line in lines)
    said = [line.partition("] ")[2] for line in lines]
    assert said[:2] == ["driver found", "driver too old"]
    # Nothing comes from a process that is killed, and of a chain of errors it is the plugin's that counts.
    assert said[-1] == {"die": "driver too old", "raise": "OSError: no driver"}.get(mode, said[-1])


def test_what_it_writes_is_passed_on(odd, capsys):
    inspect_in_child("odd_models:OddForCausalLM")
    assert capsys.readouterr() == ("driver found\n", "driver too old\n")


def test_the_files_behind_a_class_come_with_the_answer(odd, tmp_path):
    report = inspect_in_child("odd_models:OddForCausalLM")
    assert report.path == "odd_models:OddForCausalLM"
    assert report.sources[str(tmp_path / "odd_models.py")] == digest(tmp_path / "odd_models.py")
    assert {Path(name).name for name in report.sources} == {"odd_models.py", "llama.py", "causal_lm.py", "model.py"}
