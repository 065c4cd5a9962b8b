"""Finding, choosing and refusing the compiled kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.worker.kernels import library as module
from hardpoint.worker.kernels.library import Library, kernels


@pytest.fixture
def fresh(monkeypatch):
    """`kernels()` decides anew, and again after the test."""
    kernels.cache_clear()
    yield monkeypatch
    kernels.cache_clear()


def test_the_generic_set_is_always_there(library):
    assert library.isas[-1] == "generic"
    assert library.isa in library.isas


def test_a_set_this_processor_lacks_is_refused(library):
    with pytest.raises(ConfigError, match="cannot use 'neon'") as caught:
        library.use_isa("neon")
    assert "generic" in caught.value.fix


def test_the_variable_forces_a_set(library, fresh):
    fresh.setenv("HARDPOINT_CPU_KERNELS", "generic")
    found = kernels()
    assert found is not None
    assert found.isa == "generic"


def test_the_variable_switches_them_off(fresh, caplog):
    fresh.setenv("HARDPOINT_CPU_KERNELS", "off")
    with caplog.at_level(logging.INFO, "hardpoint"):
        assert kernels() is None
    assert envs.HARDPOINT_CPU_KERNELS == "off"


def test_without_the_library_torch_computes(fresh, tmp_path):
    fresh.setattr(module, "PATH", tmp_path / "nothing.so")
    assert kernels() is None


def test_a_broken_library_is_no_library(fresh, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    fresh.setattr(module, "PATH", broken)
    assert kernels() is None


def test_another_interface_is_refused(library, monkeypatch):
    monkeypatch.setattr(module, "ABI", 999)
    monkeypatch.setitem(module._FUNCTIONS, "hp_of_a_later_version", (None, []))
    with pytest.raises(OSError, match="has interface"):
        Library(Path(module.PATH))
