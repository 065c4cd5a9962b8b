import re
from pathlib import Path

import pytest

from hardpoint.extensions import points
from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS, BUILTIN_PLATFORMS, BUILTINS
from hardpoint.extensions.refs import parse_ref
from hardpoint.extensions.rows import Allow, Fault, Role, State


def test_every_extension_point_is_a_row():
    assert [row.group for row in points.GROUPS] == [
        "vllm.general_plugins",
        "vllm.platform_plugins",
        "vllm.stat_logger_plugins",
        "vllm.endpoint_plugins",
        "vllm.io_processor_plugins",
        "hardpoint.request_hooks",
        "vllm.logits_processors",
    ]
    assert [row.key for row in points.REGISTRIES] == [
        "models",
        "oot_ops",
        "pluggable_layers",
        "attention_backends",
        "quantization_methods",
        "model_loaders",
        "kv_connectors",
        "ec_connectors",
        "kv_offloading_specs",
        "tool_parsers",
        "reasoning_parsers",
        "lora_resolvers",
        "sleep_mode_backends",
        "kv_cache_dtypes",
        "structured_output_backends",
        "draft_proposers",
    ]
    assert len(points.CONFIG_HOOKS) == 12
    assert len(points.PLATFORM_HOOKS) == 10


def test_keys_are_unique_within_a_kind():
    for rows in (points.GROUPS, points.REGISTRIES, points.CONFIG_HOOKS, points.PLATFORM_HOOKS):
        assert len({row.key for row in rows}) == len(rows)


def test_groups_keep_vllms_differences():
    rows = {row.key: row for row in points.GROUPS}
    assert {key: row.allow for key, row in rows.items()} == {
        "general": Allow.OPTIONAL,
        "platforms": Allow.OPTIONAL,
        "stat_loggers": Allow.OPTIONAL,
        "endpoints": Allow.REQUIRED,
        "io_processors": Allow.OPTIONAL,
        "request_hooks": Allow.OPTIONAL,
        "logits_processors": Allow.IGNORED,
    }
    assert rows["general"].import_fails is Fault.SKIP_ERROR
    assert rows["general"].call_fails is Fault.STOP
    assert rows["platforms"].import_fails is Fault.SKIP_WARNING
    assert rows["platforms"].call_fails is Fault.SKIP_UNLESS_NAMED
    assert rows["stat_loggers"].wrong_type is Fault.STOP_TYPE_ERROR
    assert rows["endpoints"].call_fails is rows["endpoints"].wrong_type is Fault.SKIP_ERROR
    assert rows["io_processors"].call_fails is Fault.SKIP_WARNING
    assert rows["logits_processors"].import_fails is Fault.STOP_RUNTIME_ERROR
    assert rows["logits_processors"].wrong_type is Fault.STOP_VALUE_ERROR
    assert rows["general"].roles == rows["platforms"].roles == Role.ALL
    assert rows["logits_processors"].roles == Role.FRONT_END | Role.WORKER
    for key in ("stat_loggers", "endpoints", "io_processors"):
        assert rows[key].roles is Role.FRONT_END


@pytest.mark.parametrize("row", [r for r in points.ROWS if getattr(r, "contract", "")], ids=lambda row: row.key)
def test_contracts_are_references_into_the_contracts_package(row):
    module, _ = parse_ref(row.contract)
    assert module.startswith("hardpoint.contracts.")


def test_builtins_are_references_of_rows_that_exist():
    assert set(BUILTINS) <= {row.key for row in points.REGISTRIES}
    assert set(BUILTIN_ENTRY_POINTS) <= {row.group for row in points.GROUPS}
    refs = [ref for entries in (*BUILTINS.values(), *BUILTIN_ENTRY_POINTS.values()) for ref in entries.values()]
    for ref in [*refs, *BUILTIN_PLATFORMS.values()]:
        assert parse_ref(ref)[0].startswith("hardpoint.")


def test_rows_are_found_by_key_and_by_group_name():
    assert points.group_row("general") is points.group_row("vllm.general_plugins")
    assert points.registry_row("models").key == "models"
    assert points.config_hook_row("worker_cls").flag == "--worker-cls"
    assert next(row for row in points.PLATFORM_HOOKS if row.key == "import_kernels").state is State.BUILT
    with pytest.raises(KeyError):
        points.group_row("vllm.nothing")


def test_rows_hold_strings_and_enums_one_line_each():
    lines = Path(points.__file__).read_text(encoding="utf-8").splitlines()
    for kind, rows in (
        ("Group", points.GROUPS),
        ("Registry", points.REGISTRIES),
        ("ConfigHook", points.CONFIG_HOOKS),
        ("PlatformHook", points.PLATFORM_HOOKS),
    ):
        written = [line for line in lines if re.match(rf" {{4}}{kind}\(", line)]
        assert len(written) == len(rows)
        assert all(line.rstrip().endswith("),") for line in written)


def test_role_labels():
    assert Role.FRONT_END.label == "front_end"
    assert (Role.ENGINE_CORE | Role.WORKER).label == "engine_core+worker"
    assert Role(0).label == "none"
