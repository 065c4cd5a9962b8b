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
from hardpoint.testing.plugins import Plugin, make_plugin, plugin_environment, project_plugin
from hardpoint.testing.server import RunningServer

if TYPE_CHECKING:
    from hardpoint.testing.checks.attention_backend import check_attention_backend
    from hardpoint.testing.checks.custom_op import check_custom_op, check_pluggable_layer
    from hardpoint.testing.checks.endpoint_plugin import check_endpoint_plugin
    from hardpoint.testing.checks.io_processor import check_io_processor
    from hardpoint.testing.checks.logits_processor import check_logits_processor
    from hardpoint.testing.checks.lora_resolver import check_lora_resolver
    from hardpoint.testing.checks.model import check_model, check_model_class
    from hardpoint.testing.checks.model_loader import check_model_loader
    from hardpoint.testing.checks.parsers import check_reasoning_parser, check_tool_parser
    from hardpoint.testing.checks.platform import check_platform
    from hardpoint.testing.checks.project import check_project
    from hardpoint.testing.checks.quantization import check_quantization_config
    from hardpoint.testing.checks.request_hook import check_request_hook
    from hardpoint.testing.checks.scheduler import check_scheduler
    from hardpoint.testing.checks.stat_logger import check_stat_logger
    from hardpoint.testing.checks.structured_output import check_structured_output_backend
    from hardpoint.testing.checks.worker import check_executor, check_worker, check_worker_extension
    from hardpoint.testing.engine import engine_here
    from hardpoint.testing.tiny_config import tiny_vllm_config
    from hardpoint.testing.tiny_llama import tiny_model, write_tiny_llama

# Loaded when asked for: most of them need torch.
_LATER = {
    "check_attention_backend": "hardpoint.testing.checks.attention_backend",
    "check_custom_op": "hardpoint.testing.checks.custom_op",
    "check_endpoint_plugin": "hardpoint.testing.checks.endpoint_plugin",
    "check_executor": "hardpoint.testing.checks.worker",
    "check_io_processor": "hardpoint.testing.checks.io_processor",
    "check_logits_processor": "hardpoint.testing.checks.logits_processor",
    "check_lora_resolver": "hardpoint.testing.checks.lora_resolver",
    "check_model": "hardpoint.testing.checks.model",
    "check_model_class": "hardpoint.testing.checks.model",
    "check_model_loader": "hardpoint.testing.checks.model_loader",
    "check_platform": "hardpoint.testing.checks.platform",
    "check_project": "hardpoint.testing.checks.project",
    "check_pluggable_layer": "hardpoint.testing.checks.custom_op",
    "check_quantization_config": "hardpoint.testing.checks.quantization",
    "check_reasoning_parser": "hardpoint.testing.checks.parsers",
    "check_request_hook": "hardpoint.testing.checks.request_hook",
    "check_scheduler": "hardpoint.testing.checks.scheduler",
    "check_stat_logger": "hardpoint.testing.checks.stat_logger",
    "check_structured_output_backend": "hardpoint.testing.checks.structured_output",
    "check_tool_parser": "hardpoint.testing.checks.parsers",
    "check_worker": "hardpoint.testing.checks.worker",
    "check_worker_extension": "hardpoint.testing.checks.worker",
    "engine_here": "hardpoint.testing.engine",
    "tiny_model": "hardpoint.testing.tiny_llama",
    "tiny_vllm_config": "hardpoint.testing.tiny_config",
    "write_tiny_llama": "hardpoint.testing.tiny_llama",
}

__all__ = [
    "BootReport",
    "ContractFailure",
    "Plugin",
    "RunningServer",
    "boot_in_child",
    "check_attention_backend",
    "check_custom_op",
    "check_endpoint_plugin",
    "check_executor",
    "check_io_processor",
    "check_logits_processor",
    "check_lora_resolver",
    "check_model",
    "check_model_class",
    "check_model_loader",
    "check_platform",
    "check_pluggable_layer",
    "check_project",
    "check_quantization_config",
    "check_reasoning_parser",
    "check_request_hook",
    "check_scheduler",
    "check_stat_logger",
    "check_structured_output_backend",
    "check_tool_parser",
    "check_worker",
    "check_worker_extension",
    "engine_here",
    "make_plugin",
    "plugin_environment",
    "project_plugin",
    "tiny_model",
    "tiny_vllm_config",
    "write_tiny_llama",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return load_ref(f"{_LATER[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
