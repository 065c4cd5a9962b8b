"""One reader for GGUF model files, used for configuration, tokenizer and weights.

The file is memory-mapped and never trusted: every count, length and offset is held against the
bytes that are really there before it is used, so a cut or forged file ends in a `ModelFileError`
with path and reason instead of a crash or a giant allocation.
"""

from __future__ import annotations

import enum
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hardpoint.errors import ModelFileError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

# What a sane file may hold. Vocabularies reach some hundred thousand entries; sixteen million
# list elements are already 128 MiB of pointers.
MAX_ELEMENTS = 1 << 24
MAX_NAME_BYTES = 1 << 16
MAX_DIMS = 4
MAX_NESTING = 4
MAX_PARTS = 1 << 12

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}


class GGMLType(enum.IntEnum):
    """How a tensor's numbers are stored. Names and values are those of `gguf.GGMLQuantizationType`."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41


# type -> (numbers in a block, bytes of a block); a test compares it with `gguf.GGML_QUANT_SIZES`.
BLOCK_SIZES: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 40),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it looks like.

    shape   outermost dimension first, as in torch; counts numbers, not bytes
    offset  bytes from the start of its file
    nbytes  bytes it occupies
    part    which file of a split model it is in, 0 for the first
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int
    part: int = 0


class GGUFFile:
    """An open GGUF model, one file or all parts of a split one.

    metadata  key -> number, bool, str or list of these
    tensors   name -> TensorInfo, in file order
    paths     the files, first part first
    """

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self.path = parts[0].path
        self.paths = [part.path for part in parts]
        self.metadata = parts[0].metadata
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            for name, info in part.tensors.items():
                if name in self.tensors:
                    raise part.error(f"tensor {name!r} occurs a second time")
                self.tensors[name] = info

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map and check a file; with the first part of a split model, all its parts.

        Raises `ModelFileError` for anything that is not a whole, sound GGUF file.
        """
        first = _Part(Path(path), 0)
        parts = [first, *(_Part(other, number) for number, other in enumerate(_other_parts(first), 1))]
        opened = cls(parts)
        expected = first.metadata.get("split.tensors.count")
        if len(parts) > 1 and expected is not None and expected != len(opened.tensors):
            raise first.error(f"its parts hold {len(opened.tensors)} tensors together, the header promises {expected}")
        return opened

    def data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes as a read-only view into the mapped file; nothing is copied."""
        return np.frombuffer(self._parts[info.part].map, dtype=np.uint8, count=info.nbytes, offset=info.offset)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a regular file that starts like a GGUF file, whatever its name."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def part_names(name: str) -> list[str]:
    """Return the file names of all parts of a split model, in order, from that of one; else the name alone."""
    found = _SPLIT.match(name)
    count = int(found["count"]) if found else 1
    if found is None or not 1 < count <= MAX_PARTS:
        return [name]
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def _other_parts(first: _Part) -> list[Path]:
    count = first.metadata.get("split.count", 0)
    named = _SPLIT.match(first.path.name)
    if not isinstance(count, int) or count <= 1:
        if named and int(named["count"]) > 1:
            raise first.error("its name says it is one part of a split model, its header does not")
        return []
    number = first.metadata.get("split.no", 0)
    if number != 0:
        raise first.error(f"it is part {number + 1} of {count}", fix="give the path of the first part")
    if count > MAX_PARTS:
        raise first.error(f"it claims to have {count} parts")
    if not named or int(named["count"]) != count:
        raise first.error(
            f"it is the first of {count} parts, which cannot be found from its name",
            fix=f"name the parts NAME-00001-of-{count:05}.gguf and so on",
        )
    others = [first.path.with_name(name) for name in part_names(first.path.name)[1:]]
    missing = [other.name for other in others if not other.exists()]
    if missing:
        raise first.error(
            f"of its {count} parts {', '.join(missing[:5])} is missing", fix="fetch all parts into one folder"
        )
    return others


class _Part:
    """One mapped file: header parsed, tensor ranges checked."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.map = self._map()
        self.size = len(self.map)
        self._elements = 0
        self.metadata, self.tensors = self._parse()

    def error(self, reason: str, fix: str = "") -> ModelFileError:
        return ModelFileError(f"{self.path} cannot be used as a GGUF model: {reason}", code="gguf-file", fix=fix)

    def _map(self) -> mmap.mmap:
        try:
            with open(self.path, "rb") as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise self.error("it is not a regular file")
                if found.st_size == 0:
                    raise self.error("it is empty (0 bytes)")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except IsADirectoryError:
            raise self.error("it is a folder, not a file") from None
        except FileNotFoundError:
            raise self.error("it does not exist") from None
        except PermissionError:
            raise self.error("no permission to read it") from None
        except OSError as problem:
            raise self.error(problem.strerror or str(problem)) from None

    # -- primitive reads -------------------------------------------------------------------------

    def _need(self, offset: int, count: int, what: str) -> None:
        if count > self.size - offset:
            raise self.error(
                f"{what} needs {count} bytes at offset {offset}, the file has {self.size} bytes",
                fix="the file is cut or damaged; fetch it again",
            )

    def _u32(self, offset: int, what: str) -> int:
        self._need(offset, 4, what)
        return int(_U32.unpack_from(self.map, offset)[0])

    def _u64(self, offset: int, what: str) -> int:
        self._need(offset, 8, what)
        return int(_U64.unpack_from(self.map, offset)[0])

    def _string(self, offset: int, what: str, limit: int | None = None) -> tuple[str, int]:
        length = self._u64(offset, what)
        offset += 8
        if limit is not None and length > limit:
            raise self.error(f"{what} claims a length of {length} bytes")
        self._need(offset, length, what)
        try:
            return self.map[offset : offset + length].decode(), offset + length
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8 text") from None

    # -- header ----------------------------------------------------------------------------------

    def _parse(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        tensor_count, key_count = self._counts()
        offset = 24
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key, offset = self._string(offset, "a metadata key", MAX_NAME_BYTES)
            kind = self._u32(offset, f"the type of {key!r}")
            if key in metadata:
                raise self.error(f"metadata key {key!r} occurs twice")
            metadata[key], offset = self._value(offset + 4, kind, key, 0)
        return metadata, self._tensor_table(offset, tensor_count, self._alignment(metadata))

    def _counts(self) -> tuple[int, int]:
        if self.map[: len(MAGIC)] != MAGIC:
            raise self.error(
                "it does not start with the letters GGUF", fix="check that the download is the model itself"
            )
        version = self._u32(4, "the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "a big-endian file" if swapped in VERSIONS else f"GGUF version {version}"
            raise self.error(f"it is {kind}; versions {VERSIONS[0]} and {VERSIONS[1]}, little-endian, can be read")
        tensor_count, key_count = self._u64(8, "the tensor count"), self._u64(16, "the metadata count")
        # The smallest entries there can be: 8 + 4 + 1 bytes for a key, 8 + 4 + 8 + 4 + 8 for a tensor.
        if key_count * 13 + tensor_count * 32 > self.size:
            raise self.error(
                f"it claims {key_count} metadata keys and {tensor_count} tensors, more than fit into {self.size} bytes"
            )
        return tensor_count, key_count

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 30:
            raise self.error(f"general.alignment is {alignment!r}, not a power of two")
        return alignment

    def _value(self, offset: int, kind: int, key: str, depth: int) -> tuple[Any, int]:
        what = f"the value of {key!r}"
        if kind == _STRING:
            return self._string(offset, what)
        if kind == _ARRAY:
            return self._array(offset, key, depth)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.error(f"{what} has the unknown type {kind}")
        self._need(offset, scalar.size, what)
        return scalar.unpack_from(self.map, offset)[0], offset + scalar.size

    def _array(self, offset: int, key: str, depth: int) -> tuple[list[Any], int]:
        kind = self._u32(offset, f"the element type of {key!r}")
        length = self._u64(offset + 4, f"the length of {key!r}")
        offset += 12
        self._elements += length
        if self._elements > MAX_ELEMENTS:
            raise self.error(f"{key!r} claims {length} elements; a model has at most {MAX_ELEMENTS}")
        if kind == _STRING:
            return self._strings(offset, length, key)
        if kind == _ARRAY:
            return self._nested(offset, length, key, depth + 1)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.error(f"the elements of {key!r} have the unknown type {kind}")
        self._need(offset, length * scalar.size, f"the value of {key!r}")
        values = np.frombuffer(self.map, dtype=np.dtype(scalar.format), count=length, offset=offset).tolist()
        return values, offset + length * scalar.size

    def _nested(self, offset: int, length: int, key: str, depth: int) -> tuple[list[Any], int]:
        if depth > MAX_NESTING:
            raise self.error(f"{key!r} is nested deeper than {MAX_NESTING} arrays")
        values: list[Any] = []
        for _ in range(length):
            value, offset = self._array(offset, key, depth)
            values.append(value)
        return values, offset

    def _strings(self, offset: int, length: int, key: str) -> tuple[list[str], int]:
        # The hot loop of opening a file (a vocabulary and its merges): no call per string.
        self._need(offset, length * 8, f"the value of {key!r}")
        values: list[str] = []
        data, size, read = self.map, self.size, _U64.unpack_from
        add: Callable[[str], None] = values.append
        try:
            for _ in range(length):
                (count,) = read(data, offset)
                end = offset + 8 + count
                if end > size:
                    raise self.error(f"a string of {count} bytes in {key!r} reaches past the end of the file")
                add(data[offset + 8 : end].decode())
                offset = end
        except struct.error:
            raise self.error(f"{key!r} reaches past the end of the file") from None
        except UnicodeDecodeError:
            raise self.error(f"element {len(values)} of {key!r} is not UTF-8 text") from None
        return values, offset

    # -- tensors ---------------------------------------------------------------------------------

    def _tensor_table(self, offset: int, count: int, alignment: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name, offset = self._string(offset, "a tensor name", MAX_NAME_BYTES)
            dims = self._u32(offset, f"tensor {name!r}")
            if not 1 <= dims <= MAX_DIMS:
                raise self.error(f"tensor {name!r} has {dims} dimensions")
            self._need(offset + 4, dims * 8 + 12, f"tensor {name!r}")
            *shape, kind, start = struct.unpack_from(f"<{dims}QIQ", self.map, offset + 4)
            offset += 4 + dims * 8 + 12
            entries.append((name, shape, kind, start))
        base = -(-offset // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, start in entries:
            if name in tensors:
                raise self.error(f"tensor {name!r} occurs twice")
            if start % alignment:
                raise self.error(f"tensor {name!r} starts at {start}, which is not a multiple of {alignment}")
            tensors[name] = self._tensor(name, shape, kind, base + start)
        return tensors

    def _tensor(self, name: str, shape: list[int], kind: int, start: int) -> TensorInfo:
        try:
            ggml_type = GGMLType(kind)
        except ValueError:
            raise self.error(f"tensor {name!r} has the unknown storage type {kind}") from None
        numbers, block_bytes = BLOCK_SIZES[ggml_type]
        if 0 in shape:
            raise self.error(f"tensor {name!r} is empty (shape {shape[::-1]})")
        if shape[0] % numbers:
            raise self.error(
                f"tensor {name!r}: rows of {shape[0]} do not divide into {ggml_type.name} blocks of {numbers}"
            )
        nbytes = block_bytes
        for size in (shape[0] // numbers, *shape[1:]):
            nbytes *= size
        self._need(start, nbytes, f"tensor {name!r}")
        return TensorInfo(name, tuple(reversed(shape)), ggml_type, start, nbytes, self.number)
