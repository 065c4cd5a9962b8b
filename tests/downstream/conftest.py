"""A server with nobody's plugins, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server_process import ServerProcess


@pytest.fixture(scope="session")
def plain(tiny_llama: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tiny_llama, env={"VLLM_PLUGINS": ""}) as server:
        yield server.wait_ready()
