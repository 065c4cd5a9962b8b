"""Where results go: a JSON file, and a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hardpoint.config.arguments import FlagError


def save(path: Path, result: dict[str, Any], append: bool = False) -> None:
    """Write one JSON object; with `append` on a line after what is there. Raises FlagError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n" if append else json.dumps(result, indent=1) + "\n")
    except OSError as problem:
        raise FlagError(f"{path} cannot be written: {problem.strerror}", code="flag-value") from None
    print(f"saved to {path}", file=sys.stderr)


@contextlib.contextmanager
def progress(total: int, unit: str, off: bool = False) -> Iterator[Callable[[], object]]:
    """A progress bar on standard error where that is a terminal; yields what to call after each step."""
    with bar_on_a_terminal(total=total, unit=f" {unit}", disable=off) as bar:
        yield lambda: bar.update()


def bar_on_a_terminal(*words: Any, disable: bool = False, **options: Any) -> Any:
    """A tqdm bar that shows itself only on a terminal."""
    hidden = disable or not sys.stderr.isatty()
    return tqdm(*words, **{"file": sys.stderr, "dynamic_ncols": True, **options, "disable": hidden})
