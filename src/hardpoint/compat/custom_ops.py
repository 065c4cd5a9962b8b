"""`vllm._custom_ops`: importing it lets the platform load its kernels, once per process.

The kernels vLLM compiles for GPUs do not exist here; asking for one is an error naming it.
"""

from __future__ import annotations

from typing import Any

from hardpoint.platforms import import_kernels

import_kernels()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"vllm._custom_ops.{name}: Hardpoint has no compiled kernel of this name")
