"""Arrays as an answer carries them: lists, base64 or bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.responses import Response

from hardpoint.errors import VLLMValidationError

_ORDERS = {"native": "=", "big": ">", "little": "<"}


def to_bytes(array: np.ndarray, embed_dtype: str, endianness: str) -> bytes:
    """The numbers one after the other. Raises VLLMValidationError for a format that is not supported."""
    order = _ORDERS[endianness]
    if embed_dtype == "bfloat16":
        # The upper half of a float32, rounded to the nearest even one.
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
        halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return halves.astype(f"{order}u2").tobytes()
    if embed_dtype not in ("float32", "float16"):
        raise VLLMValidationError(
            f"embed_dtype {embed_dtype} is not supported by this server; use float32, float16 or bfloat16",
            parameter="embed_dtype",
        )
    return array.astype(f"{order}f{4 if embed_dtype == 'float32' else 2}").tobytes()


def to_json(array: np.ndarray, encoding_format: str, embed_dtype: str, endianness: str) -> Any:
    """A nested list, or base64 of the bytes."""
    if encoding_format == "float":
        return array.tolist()
    return base64.b64encode(to_bytes(array, embed_dtype, endianness)).decode("ascii")


def bytes_response(
    arrays: Sequence[np.ndarray], embed_dtype: str, endianness: str, facts: dict[str, Any] | None
) -> Response:
    """All arrays in one body; `facts` and where each array lies go into the header `metadata`, None leaves it out."""
    parts = [to_bytes(array, embed_dtype, endianness) for array in arrays]
    headers = {}
    if facts is not None:
        start, data = 0, []
        for index, (array, part) in enumerate(zip(arrays, parts, strict=True)):
            data.append(
                {
                    "index": index,
                    "embed_dtype": embed_dtype,
                    "endianness": endianness,
                    "start": start,
                    "end": start + len(part),
                    "shape": list(array.shape),
                }
            )
            start += len(part)
        headers["metadata"] = msgspec.json.encode({**facts, "data": data}).decode("ascii", "backslashreplace")
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)
