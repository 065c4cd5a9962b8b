"""Compile the CPU kernels: `python csrc/build.py OUTPUT`. Standard library only.

With `--check` the output is the program of checks/ instead of the library, with `--sanitize` it stops at whatever
reads or computes what it must not, and with `--target aarch64` it is for that architecture. `--quick` leaves out what
takes long to compile, AVX-512. `--run` runs the program, whose exit status is then the command's.

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
    "api.cpp", "attention.cpp", "bfloats.cpp", "linear.cpp", "pack.cpp", "pool.cpp", "program.cpp",
    "floats_generic.cpp", "kernels_generic.cpp",
)  # fmt: skip
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni",
    # Some compilers' own AVX-512 headers set off these two.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
NEON = ("-march=armv8.2-a+dotprod",)
TARGETS = {
    "x86_64": {
        "bfloats_avx512.cpp": (*AVX512, "-mavx512bf16"),
        "floats_avx2.cpp": AVX2,
        "kernels_avx2.cpp": AVX2,
        "floats_avx512.cpp": AVX512,
        "kernels_avx512.cpp": AVX512,
    },
    "aarch64": {"floats_neon.cpp": NEON, "kernels_neon.cpp": NEON},
}
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}
# Contracted products would round otherwise in one place than in another.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-pthread")
SANITIZERS = "-fsanitize=address,undefined"
# Code this far unrolled takes compilers minutes to put checks into when they optimise it as well.
SANITIZE = (SANITIZERS, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O0")


class BuildError(Exception):
    """Why there is no library."""


def compiler(target: str | None = None, sanitize: bool = False) -> list[str]:
    """The C++ compiler's command: $CXX, else the first that is found; BuildError when there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    names = (f"{target}-linux-gnu-g++",) if target else ("c++", "g++", "clang++")
    if sanitize:
        # It takes half as long as g++ to put checks into code this far unrolled.
        names = ("clang++", *names)
    found = [name for name in names if shutil.which(name)]
    if not found:
        raise BuildError(f"no C++ compiler was found ({', '.join(names)}, or $CXX)")
    if sanitize:
        found = [name for name in found if _has_sanitizers(name)]
        if not found:
            raise BuildError(
                "the kernels were NOT checked: no C++ compiler here can link address and undefined-behaviour checks "
                f"({SANITIZERS}; tried {', '.join(names)}). Install g++ with libasan and libubsan, or clang with its "
                "runtime libraries (Debian: g++, or clang with libclang-rt-dev), or name a compiler in $CXX."
            )
    return found[:1]


def _has_sanitizers(name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder, "nothing"))
        command = [name, SANITIZERS, "-x", "c++", "-", "-o", output]
        return not subprocess.run(command, input=b"int main() {}", capture_output=True, check=False).returncode


def build(
    output: Path, sanitize: bool = False, check: bool = False, target: str | None = None, quick: bool = False
) -> Path:
    """Compile to `output`, in whose place the result is put when it is whole; BuildError with the reason.

    target  the architecture, when it is not this machine's
    quick   without AVX-512
    """
    command, more = compiler(target, sanitize), SANITIZE if sanitize else ()
    machine = platform.machine().lower()
    special = TARGETS.get(target or ALIASES.get(machine, machine), {})
    if quick:
        special = {name: flags for name, flags in special.items() if "avx512" not in name}
        more = (*more, "-DHARDPOINT_NO_AVX512")
    files = {**dict.fromkeys(COMMON, ()), **special}
    if check:
        files |= dict.fromkeys((f"checks/{path.name}" for path in sorted((SOURCES / "checks").glob("*.cpp"))), ())
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        objects = [str(Path(folder, f"{name.replace('/', '_')}.o")) for name in files]
        steps = [
            [*command, *FLAGS, *more, *flags, "-c", str(SOURCES / name), "-o", made]
            for (name, flags), made in zip(files.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, steps))
        whole = Path(folder, "whole")
        kind = ("-static",) if check and target else () if check else ("-shared",)
        _run([*command, *more, *kind, "-pthread", *objects, "-o", str(whole)])
        whole.replace(output)
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
    parser.add_argument("--check", action="store_true", help="a program that checks the kernels, not the library")
    parser.add_argument("--target", choices=sorted(TARGETS), help="compile for this architecture")
    parser.add_argument("--quick", action="store_true", help="without AVX-512; of the sets left, check the best alone")
    parser.add_argument("--run", action="store_true", help="run the program")
    options = parser.parse_args()
    try:
        built = build(options.output, options.sanitize, options.check, options.target, options.quick)
    except BuildError as error:
        sys.exit(str(error))
    if not options.run:
        return 0
    return subprocess.run([str(built.resolve()), *(["quick"] if options.quick else [])], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
