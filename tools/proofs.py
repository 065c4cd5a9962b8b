"""Which tests show an extension point at work in real processes; the page of extension points lists them."""

from __future__ import annotations

from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, PLATFORM_HOOKS, REGISTRIES
from hardpoint.extensions.rows import Row, State

_ON_SERVER = "tests/plugins/test_groups_on_server.py"
_EXAMPLES = "tests/plugins/test_examples.py"
_PARTS = "tests/plugins/test_parts_from_plugins.py"
_DEVICE = "tests/plugins/test_second_device_on_server.py"
_PARSERS = "tests/openai/test_openai_tools.py"

# A row's key -> a test that starts processes with a plugin and sees what it does.
PROOFS = {
    "general": "tests/plugins/test_general_on_server.py",
    "platforms": "tests/plugins/test_platforms_on_server.py",
    "stat_loggers": _ON_SERVER,
    "endpoints": _ON_SERVER,
    "io_processors": _ON_SERVER,
    "request_hooks": _EXAMPLES,
    "models": "tests/plugins/test_models_from_plugins.py",
    "oot_ops": "tests/plugins/test_ops_from_plugins.py",
    "pluggable_layers": _EXAMPLES,
    "attention_backends": _PARTS,
    "quantization_methods": _PARTS,
    "model_loaders": _PARTS,
    "tool_parsers": _EXAMPLES,
    "reasoning_parsers": _EXAMPLES,
    "lora_resolvers": _EXAMPLES,
    "structured_output_backends": "tests/processes/test_structured_server.py",
    "scheduler_cls": "tests/plugins/shapes/test_shapes_on_server.py",
    "worker_cls": "tests/plugins/test_platforms_on_server.py",
    "worker_extension_cls": "tests/processes/test_mp_executor.py",
    "logits_processors": "tests/plugins/test_logits_processors_on_server.py",
    "tool_parser_plugin": _PARSERS,
    "reasoning_parser_plugin": _PARSERS,
    "model_class_overrides": "tests/plugins/test_models_from_plugins.py",
    "executor_class": _EXAMPLES,
    "additional_config": "tests/plugins/shapes/test_shapes_offline.py",
    **{row.key: _DEVICE for row in PLATFORM_HOOKS},
}
REFUSAL = "tests/unit/extensions/test_registry.py"


def rows() -> list[tuple[str, Row]]:
    """Every row, with the kind that it is."""
    kinds = {
        "group": GROUPS,
        "registry": REGISTRIES,
        "config hook": CONFIG_HOOKS,
        "platform hook": PLATFORM_HOOKS,
    }
    return [(kind, row) for kind, table in kinds.items() for row in table]


def proof(row: Row) -> str:
    """The test of a row that is built, or that of its refusal; KeyError for a built row without one."""
    return PROOFS[row.key] if row.state is State.BUILT else PROOFS.get(row.key, REFUSAL)
