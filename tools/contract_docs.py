"""The generated parts of a page of one extension point: its facts, its contract's signatures, its example."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from hardpoint.compat.rows import Entry
from hardpoint.compat.table import MODULES
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, REGISTRIES
from hardpoint.extensions.rows import ConfigHook, Group, Registry, State

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
EXAMPLES = ROOT / "examples" / "plugins"
_WIDTH = 110

# Classes that belong to a contract beside the one the row names.
MORE_CLASSES = {
    "stat_loggers": ["hardpoint.contracts.stat_logger:AggregateStatLoggerBase"],
    "logits_processors": [
        "hardpoint.contracts.logits_processor:LogitsProcessorV1",
        "hardpoint.contracts.logits_processor:AdapterLogitsProcessor",
    ],
    "models": ["hardpoint.contracts.model:VllmModelForTextGeneration"],
    "attention_backends": [
        "hardpoint.contracts.attention_backend:AttentionMetadataBuilder",
        "hardpoint.contracts.attention_backend:AttentionImpl",
    ],
    "request_hooks": ["hardpoint.contracts.request_hook:TextFilter", "hardpoint.contracts.request_hook:HookedRequest"],
    "structured_output_backends": [
        "hardpoint.contracts.structured_output:StructuredOutputGrammar",
    ],
    "quantization_methods": [
        "hardpoint.contracts.quantization:QuantizeMethodBase",
        "hardpoint.contracts.quantization:LinearMethodBase",
    ],
}
SUITES = {
    "general": ["project:check_project"],
    "platforms": ["platform:check_platform"],
    "stat_loggers": ["stat_logger:check_stat_logger"],
    "endpoints": ["endpoint_plugin:check_endpoint_plugin"],
    "io_processors": ["io_processor:check_io_processor"],
    "request_hooks": ["request_hook:check_request_hook"],
    "logits_processors": ["logits_processor:check_logits_processor"],
    "models": ["model:check_model", "model:check_model_class"],
    "oot_ops": ["custom_op:check_custom_op"],
    "pluggable_layers": ["custom_op:check_pluggable_layer"],
    "attention_backends": ["attention_backend:check_attention_backend"],
    "quantization_methods": ["quantization:check_quantization_config"],
    "model_loaders": ["model_loader:check_model_loader"],
    "tool_parsers": ["parsers:check_tool_parser"],
    "reasoning_parsers": ["parsers:check_reasoning_parser"],
    "lora_resolvers": ["lora_resolver:check_lora_resolver"],
    "structured_output_backends": ["structured_output:check_structured_output_backend"],
    "scheduler_cls": ["scheduler:check_scheduler"],
    "worker_cls": ["worker:check_worker"],
    "worker_extension_cls": ["worker:check_worker_extension"],
    "tool_parser_plugin": ["parsers:check_tool_parser"],
    "reasoning_parser_plugin": ["parsers:check_reasoning_parser"],
    "executor_class": ["worker:check_executor"],
    "model_class_overrides": ["model:check_model"],
    "additional_config": ["logits_processor:check_logits_processor"],
}


def paged_rows() -> list[Group | Registry | ConfigHook]:
    """The rows that have a page: every group, and what is built of the others; one page for a key of two rows."""
    built = [row for row in (*REGISTRIES, *CONFIG_HOOKS) if row.state is State.BUILT]
    rows = {row.key: row for row in reversed([*GROUPS, *built])}
    return list(reversed(rows.values()))


def facts(row: Group | Registry | ConfigHook) -> str:
    """The row's columns that an author needs, as a list."""
    lines = []
    if isinstance(row, Group):
        lines += [f"entry-point group `{row.group}`", f"the entry point is a {(row.value.name or '').lower()}; then: "
                  f"{row.then.value}", f"`VLLM_PLUGINS`: {row.allow.value}", f"import fails: {row.import_fails.value}",
                  f"call fails: {row.call_fails.value}", f"wrong object: {row.wrong_type.value}"]  # fmt: skip
    elif isinstance(row, Registry):
        takes = " or ".join(sorted((part.name or "").lower() for part in row.takes)).replace("ref", "reference string")
        again = row.duplicate.value
        if row.strict_duplicate is not row.duplicate:
            again += f"; in the strict form of the call: {row.strict_duplicate.value}"
        lines += [f"takes a {takes}", f"checked: {row.check.value}", f"the same name again: {again}",
                  f"chosen by {row.chosen_by}"]  # fmt: skip
    else:
        lines += [f"flag `{row.flag}`", *([f"config field `{row.field}`"] if row.field else [])]
        lines += [f"value: {row.shape.value}"]
        lines += [f"words of ours: {', '.join(f'`{word}`' for word in row.words.split())}"] if row.words else []
    lines.append(f"processes: {row.roles.label.replace('_', ' ').replace('+', ', ')}")
    lines.append(f"contract version {row.version}" + (" *(planned: nothing reads it yet)*" if is_planned(row) else ""))
    suites = ", ".join(f"`hardpoint.testing.{ref.partition(':')[2]}`" for ref in SUITES[row.key])
    lines.append(f"suite: {suites}")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def is_planned(row: Group | Registry | ConfigHook) -> bool:
    """Whether nothing in this version reads the row."""
    return row.state is State.PLANNED


def contract(row: Group | Registry | ConfigHook) -> str:
    """Every class of the contract with its docstring, its signatures and vLLM's names for it."""
    refs = [row.contract] if row.contract else []
    classes = [_class(ref) for ref in [*refs, *MORE_CLASSES.get(row.key, [])]]
    return "\n".join(classes) or "There is no class to derive from: the facts above are the contract.\n"


def suites(row: Group | Registry | ConfigHook) -> str:
    """The signatures of the suites, with what they do."""
    parts = []
    for ref in SUITES[row.key]:
        module, _, name = ref.partition(":")
        found = _find(SOURCE / "hardpoint" / "testing" / "checks" / f"{module}.py", name)
        assert isinstance(found, ast.FunctionDef)
        parts.append(_block("python", _function(found, "", whole=True)))
    return "\n".join(parts)


def example(row: Group | Registry | ConfigHook) -> str:
    """The files of the example that say what it does."""
    folder = EXAMPLES / row.key
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    where = f"[examples/plugins/{row.key}](../../examples/plugins/{row.key})"
    parts = [f"{where}: {project['description'].lower()}.\n"]
    points = project.get("entry-points", {})
    lines = []
    for group, found in points.items():
        lines += [f'[project.entry-points."{group}"]', *(f'{name} = "{value}"' for name, value in found.items())]
    parts += [_block("toml", lines)] if lines else []
    for file in sorted(folder.glob("acme_*/*.py")):
        text = file.read_text(encoding="utf-8").rstrip("\n")
        parts.append(f"`{file.relative_to(folder)}`:\n\n" + _block("python", text.splitlines()))
    return "\n".join(parts)


def _block(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"]) + "\n"


def _class(ref: str) -> str:
    module, _, name = ref.partition(":")
    found = _find(SOURCE / f"{module.replace('.', '/')}.py", name)
    assert isinstance(found, ast.ClassDef), ref
    bases = ", ".join(ast.unparse(base) for base in found.bases)
    lines = [f"class {name}({bases}):" if bases else f"class {name}:", *_docstring(found, "    ")]
    for part in _members(found):
        lines += ["", *part]
    names = ", ".join(f"`{alias}`" for alias in _aliases(ref))
    told = f"`{module}.{name}`" + (f"; under vLLM's names: {names}" if names else "")
    return f"{told}\n\n{_module_words(module, found)}" + _block("python", lines)


def _module_words(module: str, found: ast.ClassDef) -> str:
    """What the module says of who calls, where its class does not say it."""
    path = SOURCE / f"{module.replace('.', '/')}.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    if "\nCalled " in (ast.get_docstring(found) or "") or "\nCalled " not in said:
        return ""
    return _block("text", said.split("\n\n", 1)[1].splitlines()) + "\n"


def _members(found: ast.ClassDef) -> Iterator[list[str]]:
    values = [node for node in found.body if isinstance(node, ast.AnnAssign | ast.Assign) and _is_public(node)]
    if values:
        yield [f"    {ast.unparse(node)}" for node in values]
    for node in found.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_for_authors(node):
            yield _function(node, "    ")


def _is_for_authors(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    abstract = any(ast.unparse(one) == "abstractmethod" for one in node.decorator_list)
    return abstract or not node.name.startswith("_") or node.name == "__init__"


def _is_public(node: ast.AnnAssign | ast.Assign) -> bool:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return not ast.unparse(target).startswith("_")


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, indent: str, whole: bool = False) -> list[str]:
    """Decorators, signature, and the docstring: its first sentence unless `whole`."""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    parameters = _parameters(node.args)
    lines = [f"{indent}@{ast.unparse(one)}" for one in node.decorator_list]
    line = f"{indent}{kind} {node.name}({', '.join(parameters)}){returns}:"
    if len(line) > _WIDTH:
        lines += [f"{indent}{kind} {node.name}("]
        lines += [f"{indent}    {one}," for one in parameters]
        lines += [f"{indent}){returns}:"]
    else:
        lines.append(line)
    text = ast.get_docstring(node) or ""
    text = text if whole else text.split("\n\n")[0]
    if not text:
        return [*lines[:-1], lines[-1] + " ..."]
    return lines + _quoted(text, indent + "    ")


def _parameters(arguments: ast.arguments) -> list[str]:
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_parameter(one, default) for one, default in zip(plain, defaults, strict=True)]
    if arguments.vararg is not None:
        shown.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [
        _parameter(one, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return shown + (["**" + _parameter(arguments.kwarg, None)] if arguments.kwarg is not None else [])


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    text = one.arg + (f": {ast.unparse(one.annotation)}" if one.annotation is not None else "")
    if default is None:
        return text
    return text + (" = " if one.annotation is not None else "=") + ast.unparse(default)


def _docstring(node: ast.ClassDef, indent: str) -> list[str]:
    text = ast.get_docstring(node) or ""
    return _quoted(text, indent) if text else []


def _quoted(text: str, indent: str) -> list[str]:
    lines = text.splitlines()
    if len(lines) == 1:
        return [f'{indent}"""{text}"""']
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}".rstrip() for line in lines[1:]), f'{indent}"""']


def _find(path: Path, name: str) -> ast.stmt:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in tree.body if getattr(node, "name", None) == name)


def _aliases(ref: str) -> list[str]:
    found = [
        f"{module}.{name}"
        for module, row in MODULES.items()
        if isinstance(row, Entry)
        for name, target in row.names.items()
        if target == ref
    ]
    return sorted(found, key=lambda path: (path.count("."), path))[:3]
