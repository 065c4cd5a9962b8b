"""Each row that is built has what its columns promise."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

import hardpoint
from hardpoint.extensions.builtins import BUILTIN_ENTRY_POINTS, BUILTIN_PLATFORMS, BUILTINS
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, PLATFORM_HOOKS, REGISTRIES, ROWS
from hardpoint.extensions.refs import load_ref, parse_ref
from hardpoint.extensions.registry import registry
from hardpoint.extensions.rows import Check, Shape, State

SOURCE = Path(hardpoint.__file__).parent
CONTRACTS = sorted({row.contract for row in ROWS if getattr(row, "contract", "") and row.state is State.BUILT})
REGISTERED = [(key, name) for key, entries in BUILTINS.items() for name in entries]


@pytest.mark.parametrize("ref", CONTRACTS)
def test_the_contract_of_a_built_row_says_who_calls_and_what_a_fault_does(ref):
    contract = load_ref(ref)
    said = inspect.getdoc(contract) or ""
    said += inspect.getdoc(sys.modules[parse_ref(ref)[0]]) or ""
    for label in ("Built|Chosen", "Called", "Fault"):
        assert re.search(rf"^({label})\b", said, re.MULTILINE), f"{ref} does not say: {label}"


@pytest.mark.parametrize(("key", "name"), REGISTERED)
def test_a_built_in_entry_imports_and_satisfies_its_row(key, name):
    row = registry(key).row
    value = registry(key).load(name)
    assert isinstance(value, type)
    if row.check in (Check.SUBCLASS_TYPE_ERROR, Check.SUBCLASS_VALUE_ERROR):
        assert issubclass(value, load_ref(row.base))
    assert not inspect.isabstract(value)


def test_a_built_in_attention_backend_fulfils_its_contract():
    for name in BUILTINS["attention_backends"]:
        assert issubclass(
            registry("attention_backends").load(name), load_ref(registry("attention_backends").row.contract)
        )


def test_built_in_entry_points_and_detectors_are_functions():
    refs = [ref for entries in BUILTIN_ENTRY_POINTS.values() for ref in entries.values()]
    for ref in [*refs, *BUILTIN_PLATFORMS.values()]:
        assert callable(load_ref(ref))


def test_nothing_planned_has_built_in_entries():
    planned = {row.key for row in REGISTRIES if row.state is State.PLANNED}
    assert not planned & set(BUILTINS)


def source_text(*but: str) -> str:
    """The text of our code, outside the machinery that this test is about."""
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in ("extensions", *but)]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize("row", PLATFORM_HOOKS, ids=lambda row: row.key)
def test_a_platform_hook_is_a_method_and_called_if_it_is_built(row):
    platform = load_ref("hardpoint.contracts.platform:Platform")
    assert callable(getattr(platform, row.key))
    called = re.search(rf"\.{row.key}\(", source_text()) is not None
    assert called == (row.state is State.BUILT)


@pytest.mark.parametrize("row", [r for r in CONFIG_HOOKS if r.state is State.BUILT], ids=lambda row: row.key)
def test_a_built_config_hook_is_a_field_that_is_read(row):
    if not row.field:  # the front end's own: it stays in the arguments
        assert re.search(rf"\.{row.flag[2:].replace('-', '_')}\b", source_text("config")), f"nothing reads {row.flag}"
        return
    section, _, field = row.field.rpartition(".")
    config = load_ref("hardpoint.config.sections:VllmConfig")
    owner = config if not section else _section(config, section)
    assert field in owner.__dataclass_fields__
    if row.shape is not Shape.JSON:  # open data is read by plugins
        assert re.search(rf"\b{field}\b", source_text("config")), f"nothing reads {row.field}"


def _section(config: type, name: str) -> type:
    words = "".join(word.capitalize() for word in name.split("_"))
    assert name in config.__dataclass_fields__
    return load_ref(f"hardpoint.config.sections:{words}")


def test_every_built_group_has_a_consumer():
    consumers = {
        "stat_loggers": "load_stat_logger_plugin_factories(",
        "endpoints": "load_endpoint_plugins(",
        "logits_processors": "load_logits_processors(",
        "request_hooks": "load_request_hooks(",
        "io_processors": "load_io_processor_class(",
        "general": "boot(",
        "platforms": "resolve_platform_cls_qualname(",
    }
    text = source_text()
    for row in GROUPS:
        if row.state is State.BUILT:
            assert consumers[row.key] in text, f"nothing loads {row.group}"


# Each row that is built has a contract, a page, an example and a test of its own; planned ones are exempt.

PARTS = list(dict.fromkeys([*GROUPS, *(r for r in (*REGISTRIES, *CONFIG_HOOKS) if r.state is State.BUILT)]))
ROOT = SOURCE.parent.parent


@pytest.mark.parametrize("row", PARTS, ids=lambda row: f"{type(row).__name__}-{row.key}")
def test_a_row_has_a_page_an_example_and_a_contract_test(row):
    page = (ROOT / "docs" / "extensions" / f"{row.key}.md").read_text(encoding="utf-8")
    assert page.startswith("# ")
    assert f"hardpoint plugins new {row.key} " in page
    assert (ROOT / "tests" / "contracts" / f"test_{row.key}.py").is_file()
    example = ROOT / "examples" / "plugins" / row.key
    assert {"pyproject.toml", "README.md"} <= {path.name for path in example.iterdir()}
    assert (example / f"acme_{row.key}" / "__init__.py").is_file()
    assert (example / "tests" / f"test_acme_{row.key}.py").is_file()


@pytest.mark.parametrize(
    "row", [row for row in PARTS if row.contract], ids=lambda row: f"{type(row).__name__}-{row.key}"
)
def test_the_page_of_a_row_shows_the_signature_of_every_abstract_method(row):
    page = (ROOT / "docs" / "extensions" / f"{row.key}.md").read_text(encoding="utf-8")
    contract = load_ref(row.contract)
    assert re.search(rf"^class {contract.__name__}\b", page, re.MULTILINE)
    for name in getattr(contract, "__abstractmethods__", ()):
        found = re.search(rf"^    (?:async )?def {name}\((.*?)\)(?: ->|:)", page, re.DOTALL | re.MULTILINE)
        assert found, f"{name} is not shown"
        shown = re.findall(r"(?:^|,)\s*\*{0,2}(\w+)", found[1])
        method = inspect.getattr_static(contract, name)
        function = getattr(method, "fget", None) or getattr(method, "__func__", method)
        for parameter in inspect.signature(function).parameters:
            assert parameter in shown, f"{name}({parameter}) is not shown"


@pytest.mark.parametrize("row", PARTS, ids=lambda row: f"{type(row).__name__}-{row.key}")
def test_a_row_has_a_suite(row):
    page = (ROOT / "docs" / "extensions" / f"{row.key}.md").read_text(encoding="utf-8")
    suites = re.findall(r"`hardpoint\.testing\.(check_\w+)`", page)
    assert suites, "no suite is named"
    for suite in suites:
        assert callable(load_ref(f"hardpoint.testing:{suite}"))


def test_nothing_planned_has_an_example_or_a_page():
    planned = {row.key for row in (*REGISTRIES, *CONFIG_HOOKS) if row.state is State.PLANNED}
    for folder in (ROOT / "examples" / "plugins", ROOT / "docs" / "extensions", ROOT / "tests" / "contracts"):
        assert not planned & {path.stem.removeprefix("test_") for path in folder.iterdir()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{type(row).__name__}-{row.key}")
def test_every_contract_has_a_version(row):
    assert re.fullmatch(r"[1-9]\d*\.\d+", row.version)
