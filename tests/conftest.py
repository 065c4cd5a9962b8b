"""Models that tests of all parts share."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import catalogue
from hardpoint.extensions import plugin_config

# As workers do for themselves: torch's threads must not spin while other tests want the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton decides when it is imported whether kernels are interpreted, as they must be without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell has what it starts in the background ignore Ctrl-C, and what that starts would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "PYTEST_XDIST_WORKER" in os.environ:
    # The other workers want the cores as well.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from run to run, as workers must agree on what there is; workers themselves compare."""
    odd = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]{9,}", item.nodeid)]
    if odd and "PYTEST_XDIST_WORKER" not in os.environ:
        raise pytest.UsageError(f"these tests are named by an address; give them ids: {odd}")


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What workers send may hold half characters, which tests give to servers and find in logs."""
    data = yield
    return _encodable(data)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_encodable, value))
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


@pytest.fixture(autouse=True)
def no_plugin_settings() -> Iterator[None]:
    """Settings of plugins are given through the environment, which tests share."""
    with plugin_config.isolated():
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's file: `HARDPOINT_TEST_SMOLLM2`, else the cache, else fetched once into it."""
    given = os.environ.get("HARDPOINT_TEST_SMOLLM2")
    if given:
        return Path(given)
    entry = catalogue.find("smollm2-135m-instruct")
    assert entry is not None
    return catalogue.pull(entry)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random tiny Llama (float32, safetensors, the same every time) and its tokenizer."""
    from hardpoint.testing.tiny_llama import write_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder like `tiny_llama` whose config.json says something else; `make(num_hidden_layers=1)`."""
    from hardpoint.testing.tiny_llama import write_tiny_llama

    def make(**changes: Any) -> Path:
        folder = tmp_path_factory.mktemp("models") / "tiny-llama"
        write_tiny_llama(folder, **changes)
        return folder

    return make
