"""Run every check that needs no test runner, side by side, and show what the failing ones say.

python tools/check.py          check
python tools/check.py --fix    format, apply safe lint fixes, regenerate pages, then check
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
# The CPU kernels' own checks, built with sanitizers; `make sanitize` runs them for every instruction set.
KERNELS = ["csrc/build.py", "build/check-kernels-quick", "--check", "--sanitize", "--quick", "--run"]


def main() -> int:
    """Fix what can be fixed if asked to, then check; return the first failing exit status."""
    paths = [path for path in PATHS if (ROOT / path).is_dir()]
    python = sys.executable
    if "--fix" in sys.argv[1:]:
        fixes = [(name, [python, "-m", *command, *paths]) for name, command in FIXES]
        for name, command in [*fixes, ("docs", [python, "tools/gen_docs.py"])]:
            if status := step(name, command):
                return status
    # The longest first.
    checks = [("types", [python, "-m", "mypy", "--no-error-summary"]), ("kernels", [python, *KERNELS])]
    checks.append(("imports", [str(Path(python).with_name("lint-imports")), "--no-cache"]))
    checks.append(("docs in step", [python, "tools/gen_docs.py", "--check"]))
    checks += [(name, [python, "-m", *command, *paths]) for name, command in CHECKS]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        statuses = list(pool.map(lambda check: step(*check), checks))
    return next((status for status in statuses if status), 0)


def step(name: str, command: list[str]) -> int:
    """Run one command and say how it went; return its exit status."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    outcome = "ok" if done.returncode == 0 else f"FAILED\n{done.stdout}\n{done.stderr}"
    print(f"{name:<14} {time.perf_counter() - started:5.1f} s  {outcome}", flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
