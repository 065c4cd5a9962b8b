"""Compile the CPU kernels: `python csrc/build.py OUTPUT [--sanitize]`. Standard library only.

Each instruction set's file is compiled for that instruction set, the rest for any processor of the
architecture; which file's code runs is decided when the library is loaded.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
COMMON = (
    "api.cpp", "attention.cpp", "linear.cpp", "pack.cpp", "pool.cpp", "program.cpp",
    "floats_generic.cpp", "kernels_generic.cpp",
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
    # Some compilers' own AVX-512 headers set off these two.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
X86 = {
    "floats_avx2.cpp": AVX2,
    "kernels_avx2.cpp": AVX2,
    "floats_avx512.cpp": AVX512,
    "kernels_avx512.cpp": AVX512,
}
# Contracted products would round otherwise in one place than in another.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")


class BuildError(Exception):
    """Why there is no library."""


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else the first that is found; BuildError when there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise BuildError("no C++ compiler was found (c++, g++ or clang++, or $CXX)")
    return [found]


def build(output: Path, sanitize: bool = False) -> Path:
    """Compile the library to `output`, in whose place it is put when it is whole; BuildError with the reason."""
    command, more = compiler(), SANITIZE if sanitize else ()
    x86 = X86 if platform.machine().lower() in ("x86_64", "amd64") else {}
    files = {**dict.fromkeys(COMMON, ()), **x86}
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        objects = [str(Path(folder, f"{name}.o")) for name in files]
        steps = [
            [*command, *FLAGS, *more, *flags, "-c", str(SOURCES / name), "-o", target]
            for (name, flags), target in zip(files.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, steps))
        library = Path(folder, "library")
        _run([*command, *more, "-shared", "-pthread", *objects, "-o", str(library)])
        library.replace(output)
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def main() -> int:
    """Compile; return the exit status."""
    parser = argparse.ArgumentParser(description="Compile the CPU kernels.")
    parser.add_argument("output", type=Path)
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined-behaviour checks")
    options = parser.parse_args()
    try:
        build(options.output, options.sanitize)
    except BuildError as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
