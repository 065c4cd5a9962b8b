"""What can be said of a reference without importing anything."""

from __future__ import annotations

import sys

import pytest

from hardpoint.extensions.find_ref import why_not_found

PLAIN = """
raise RuntimeError("this module must not be imported")

class Found:
    class Inner: ...
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    folder = tmp_path / "findable"
    (folder / "deeper").mkdir(parents=True)
    for name in ("__init__.py", "deeper/__init__.py", "deeper/plain.py"):
        (folder / name).write_text(PLAIN)
    (folder / "lazy.py").write_text("def __getattr__(name): ...")
    (folder / "starred.py").write_text("from os.path import *")
    (folder / "odd.py").write_bytes(b"\xff\xfe not text")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    assert not [name for name in sys.modules if name.startswith("findable")]


@pytest.mark.parametrize(
    "ref",
    [
        "findable:Found", "findable.deeper.plain:Found", "findable.deeper.plain:Found.Inner", "findable.lazy:Anything",
        "findable.starred:join", "findable.odd:Anything", "json:JSONDecoder", "hardpoint.worker.device_worker:Worker",
        "math:sqrt",
    ],
)  # fmt: skip
def test_nothing_speaks_against_what_may_be_there(ref):
    assert why_not_found(ref) is None


@pytest.mark.parametrize(
    ("ref", "why"),
    [
        ("no_such:X", "there is no module 'no_such'"),
        ("findable.nope:X", "there is no module 'findable.nope'"),
        ("findable.nope.more:X", "there is no module 'findable.nope'"),
        ("findable.deeper.plain.more:X", "'findable.deeper.plain' is not a package"),
        ("findable.deeper.plain:Missing", "'findable.deeper.plain' has no attribute 'Missing'"),
        ("findable.deeper.plain:Foun", "has no attribute 'Foun'"),
        ("json:Nope", "'json' has no attribute 'Nope'"),
        ("json.nope:X", "there is no module 'json.nope'"),
    ],
)
def test_what_cannot_be_there_is_said(ref, why):
    assert why in why_not_found(ref)


def test_a_finder_that_fails_says_nothing(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            raise OSError("the network is down")

    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert why_not_found("no_such_module:X") is None
