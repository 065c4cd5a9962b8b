"""Which built-in platform this machine has. At most one answers; torch is not imported to find out."""

from __future__ import annotations

import functools
import importlib.util
import os

from hardpoint.env import envs

CUDA = "hardpoint.platforms.cuda.CudaPlatform"
CPU = "hardpoint.platforms.cpu.CpuPlatform"

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/usr/lib/wsl/lib/libcuda.so.1")


def cuda_platform() -> str | None:
    """The CUDA platform where an NVIDIA driver and a torch built for it are installed."""
    return CUDA if _wants_cuda() and has_nvidia_device() and has_cuda_torch() else None


def cpu_platform() -> str | None:
    """The CPU platform, unless a device is there or another target is asked for."""
    if envs.is_set("VLLM_TARGET_DEVICE"):
        return CPU if envs.VLLM_TARGET_DEVICE.lower() == "cpu" else None
    return CPU if cuda_platform() is None else None


def _wants_cuda() -> bool:
    return not envs.is_set("VLLM_TARGET_DEVICE") or envs.VLLM_TARGET_DEVICE.lower() == "cuda"


def has_nvidia_device() -> bool:
    """Whether the NVIDIA driver offers a device that is not hidden from this process."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(os.path.exists(path) for path in _DEVICE_FILES)


@functools.cache
def has_cuda_torch() -> bool:
    """Whether the installed torch is a CUDA build, read from its version file without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return False
    return any(line.startswith("cuda") and "None" not in line for line in text.splitlines())
