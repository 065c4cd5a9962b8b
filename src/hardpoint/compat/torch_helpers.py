"""Torch helpers plugins import from vLLM. Importing this module imports torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of new floating-point tensors inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def guard_cuda_initialization() -> Iterator[None]:
    """Hide CUDA devices inside the block, so that an import cannot start the driver."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def direct_register_custom_op(
    op_name: str,
    op_func: Callable[..., Any],
    mutates_args: list[str] | None = None,
    fake_impl: Callable[..., Any] | None = None,
    target_lib: Any = None,
    dispatch_key: str | None = None,
    tags: tuple[Any, ...] = (),
) -> None:
    """Make `torch.ops.vllm.<op_name>` call `op_func`.

    mutates_args  names of arguments the function writes to
    fake_impl     the same function over shapes only, for torch.compile
    dispatch_key  torch dispatch key; the current platform's when None
    """
    from hardpoint.platforms import current_platform  # noqa: PLC0415 - detection must not run at import

    schema = torch.library.infer_schema(op_func, mutates_args=mutates_args or [])
    library = target_lib or _library()
    library.define(op_name + schema, tags=tags)
    library.impl(op_name, op_func, dispatch_key=dispatch_key or current_platform.dispatch_key)
    if fake_impl is not None:
        library._register_fake(op_name, fake_impl)


_kept: list[Any] = []


def _library() -> Any:
    if not _kept:
        _kept.append(torch.library.Library("vllm", "FRAGMENT"))
    return _kept[0]


def async_tensor_h2d(
    data: list[Any], dtype: torch.dtype, target_device: str | torch.device, pin_memory: bool = False
) -> torch.Tensor:
    """Copy a list to a device without waiting for the copy."""
    return torch.tensor(data, dtype=dtype, pin_memory=pin_memory).to(device=target_device, non_blocking=True)
