"""Run every check that needs no test runner, in order, and stop at the first failure.

python tools/check.py          check
python tools/check.py --fix    format, apply safe lint fixes, regenerate pages, then check
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = ["src", "tests", "tools", "bench", "examples"]

FIXES = [
    ("format", ["ruff", "format"]),
    ("lint", ["ruff", "check", "--fix"]),
]
CHECKS = [
    ("format", ["ruff", "format", "--check"]),
    ("lint", ["ruff", "check"]),
]


def main() -> int:
    """Run the steps; return the first failing exit status."""
    paths = [path for path in PATHS if (ROOT / path).is_dir()]
    python = sys.executable
    steps: list[tuple[str, list[str]]] = []
    if "--fix" in sys.argv[1:]:
        steps += [(name, [python, "-m", *command, *paths]) for name, command in FIXES]
        steps.append(("docs", [python, "tools/gen_docs.py"]))
    steps += [(name, [python, "-m", *command, *paths]) for name, command in CHECKS]
    steps.append(("types", [python, "-m", "mypy", "--no-error-summary"]))
    steps.append(("imports", [str(Path(python).with_name("lint-imports")), "--no-cache"]))
    steps.append(("docs in step", [python, "tools/gen_docs.py", "--check"]))
    for name, command in steps:
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
        print(f"{name:<14} {time.perf_counter() - started:5.1f} s  {'ok' if done.returncode == 0 else 'FAILED'}")
        if done.returncode != 0:
            print(done.stdout, done.stderr, sep="\n")
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
