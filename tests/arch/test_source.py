"""Rules of the source that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import hardpoint

SOURCE = Path(hardpoint.__file__).parent
ROOT = SOURCE.parent.parent
FILES = sorted(SOURCE.rglob("*.py"))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def offenders(pattern: str, *exempt: str) -> list[str]:
    """Files outside the exempt folders or files of the package that match a pattern."""
    found = []
    for path in FILES:
        name = path.relative_to(SOURCE).as_posix()
        if not name.startswith(exempt) and re.search(pattern, text_of(path)):
            found.append(name)
    return found


def imported(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_there_are_files():
    assert len(FILES) > 50


def test_no_module_or_folder_has_a_name_that_says_nothing():
    parts = {part for path in FILES for part in path.relative_to(SOURCE).with_suffix("").parts}
    assert not parts & {"utils", "util", "helpers", "helper", "common_utils", "misc", "v1", "v2"}


def test_our_code_does_not_import_through_the_alias():
    outside = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "compat"]
    assert not [path for path in outside if any(name.split(".")[0] == "vllm" for name in imported(path))]


def test_a_platform_is_asked_for_facts_and_not_for_its_name():
    by_name = r"\.is_(?:cuda|cpu|rocm|xpu|tpu|cuda_alike)\("
    assert not offenders(by_name, "platforms/", "compat/", "contracts/platform.py")


def test_a_todo_names_its_issue():
    assert not offenders(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))")


def test_nothing_is_unpickled():
    assert not offenders(r"\bpickle\.loads?\(|\btorch\.load\((?!.*weights_only=True)")


def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "tools/gen_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
