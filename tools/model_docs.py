"""The generated part of docs/models.md: the models we ship, what they can do, and the tests that show it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from hardpoint.config.fallback import FALLBACK
from hardpoint.config.gguf_facts import KINDS
from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.refs import parse_ref
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "unit" / "worker" / "models"
# What a test shows -> its file.
SHOWN = {
    "safetensors": "test_architectures.py",
    "GGUF": "test_gguf_architectures.py",
    "two ranks": "test_architectures_on_two_ranks.py",
    "by transformers": "test_transformers_backend.py",
}


def supported(table: Callable[[Iterable[str], Iterable[Iterable[str]]], str]) -> str:
    """The table of built-in architectures."""
    gguf = _gguf_kinds()
    lines = []
    for architecture, ref in BUILTINS["models"].items():
        info = BUILT_IN_MODEL_INFO[architecture]
        can = [name for name, able in (("pipeline stages", info.supports_pp), ("adapters", info.supports_lora)) if able]
        kinds = ", ".join(f"`{kind}`" for kind in gguf.get(architecture, ())) or "-"
        lines.append([f"`{architecture}`", _about(ref), kinds, ", ".join(can) or "-", _proof(architecture)])
    return table(("class", "what it is", "GGUF architecture", "declares", "held against transformers"), lines)


def _gguf_kinds() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, kind in KINDS.items():
        found.setdefault(kind.model_class, []).append(name)
        if kind.with_experts is not None and kind.with_experts.model_class != kind.model_class:
            found.setdefault(kind.with_experts.model_class, []).append(f"{name} with experts")
    return found


def _about(ref: str) -> str:
    """The first sentence of the class, read from its source."""
    module, path = parse_ref(ref)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    shared = (ast.get_docstring(tree) or "").partition("\n")[0]
    own = next(ast.get_docstring(node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name == path)
    text = own or "" if module.endswith((".llama", ".transformers_backend")) else shared
    return text.partition("\n")[0].rstrip(".")


def _proof(architecture: str) -> str:
    if architecture == FALLBACK:
        return f"[{SHOWN['by transformers']}](../{(TESTS / SHOWN['by transformers']).relative_to(ROOT)})"
    stem = re.sub(r"(ForCausalLM|LMHeadModel)$", "", architecture)
    wanted = re.compile(rf'"{stem}(Text)?Config"')
    shown = [
        f"[{what}](../{(TESTS / file).relative_to(ROOT)})"
        for what, file in SHOWN.items()
        if what != "by transformers" and wanted.search((TESTS / file).read_text(encoding="utf-8"))
    ]
    return ", ".join(shown) or "**nothing**"
