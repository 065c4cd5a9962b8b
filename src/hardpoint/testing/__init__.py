"""For authors of plugins: plugins from source text, roles and servers to try them in, and a suite for every contract.

    from hardpoint.testing import check_stat_logger

    def test_it_keeps_the_contract():
        check_stat_logger(MyLogger)

`pytest_plugins = ["hardpoint.testing.pytest_plugin"]` in a `conftest.py` brings the fixtures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.report import BootReport, boot_in_child
from hardpoint.testing.failures import ContractFailure
from hardpoint.testing.plugins import Plugin, make_plugin, plugin_environment

if TYPE_CHECKING:
    from hardpoint.testing.checks.endpoint_plugin import check_endpoint_plugin
    from hardpoint.testing.checks.io_processor import check_io_processor
    from hardpoint.testing.checks.logits_processor import check_logits_processor
    from hardpoint.testing.checks.stat_logger import check_stat_logger
    from hardpoint.testing.tiny_config import tiny_vllm_config
    from hardpoint.testing.tiny_model import tiny_model

# Loaded when asked for: most of them need torch.
_LATER = {
    "check_endpoint_plugin": "hardpoint.testing.checks.endpoint_plugin",
    "check_io_processor": "hardpoint.testing.checks.io_processor",
    "check_logits_processor": "hardpoint.testing.checks.logits_processor",
    "check_stat_logger": "hardpoint.testing.checks.stat_logger",
    "tiny_model": "hardpoint.testing.tiny_model",
    "tiny_vllm_config": "hardpoint.testing.tiny_config",
}

__all__ = [
    "BootReport",
    "ContractFailure",
    "Plugin",
    "boot_in_child",
    "check_endpoint_plugin",
    "check_io_processor",
    "check_logits_processor",
    "check_stat_logger",
    "make_plugin",
    "plugin_environment",
    "tiny_model",
    "tiny_vllm_config",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return load_ref(f"{_LATER[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
