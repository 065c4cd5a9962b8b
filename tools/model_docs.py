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
        abilities = {
            "text": info.is_text_generation_model,
            "vectors": info.is_pooling_model,
            "media": info.supports_multimodal,
            "pipeline stages": info.supports_pp,
            "adapters": info.supports_lora,
        }
        can = [name for name, able in abilities.items() if able]
        kinds = ", ".join(f"`{kind}`" for kind in gguf.get(architecture, ())) or "-"
        lines.append([f"`{architecture}`", _about(ref), kinds, ", ".join(can) or "-", _proof(architecture)])
    return table(("class", "what it is", "GGUF architecture", "declares", "shown by"), lines)


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
    if spec is None or spec.origin is None:
        return "-"
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
    return ", ".join(shown) or _named_in_tests(architecture)


def _named_in_tests(architecture: str) -> str:
    """Tests that name an architecture, for those that the tests above do not cover."""
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in every if f'"{architecture}"' in path.read_text(encoding="utf-8")]
    return ", ".join(f"[{path.name}](../{path.relative_to(ROOT)})" for path in found[:3]) or "**nothing**"
