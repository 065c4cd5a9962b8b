"""The compiled CPU kernels, called through ctypes. `csrc/hardpoint.h` is the interface they have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.log import init_logger

logger = init_logger(__name__)

PATH = Path(__file__).with_name("libhardpoint.so")
ABI = 4


class Matrix(Structure):
    """One matrix; plain: not packed, its rows stand one after another."""

    _fields_: ClassVar[Any] = [("type", c_int32), ("plain", c_int32), ("rows", c_int64), ("packed", c_void_p)]


class Linear(Structure):
    """Matrices with the same input, whose outputs stand side by side."""

    _fields_: ClassVar[Any] = [("columns", c_int64), ("count", c_int64), ("matrices", POINTER(Matrix))]


# name -> result, arguments
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "hp_isas": (c_char_p, []),
    "hp_isa": (c_char_p, []),
    "hp_use_isa": (c_int32, [c_char_p]),
    "hp_set_threads": (None, [c_int32, c_void_p]),
    "hp_threads": (c_int32, []),
    "hp_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "hp_pack": (c_int32, [c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p]),
    "hp_lookup": (c_int32, [c_void_p, c_int64, c_void_p, c_int64, c_void_p]),
    "hp_plain_linear": (
        None,
        [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "hp_bfloat_products": (c_int32, []),
    "hp_bfloat_linear": (
        c_int32,
        [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p],
    ),
    "hp_linear": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p]),
    "hp_rms_norm": (None, [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "hp_layer_norm": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "hp_rotate": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64],
    ),
    "hp_activate": (None, [c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64]),
    "hp_attention": (
        None,
        [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64],
    ),
    "hp_draw": (None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "hp_log_sums": (None, [c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "hp_run": (c_int32, [c_void_p, c_void_p]),
}


class Library:
    """The loaded kernels.

    linear  short calls: they keep the interpreter's lock, because giving it up can cost more than they take
    linear_long  the same, but other Python threads may run meanwhile
    plain_linear, plain_linear_long  the same two for weights that are not packed
    bfloat_linear, bfloat_linear_long  and where all numbers are bfloat16; only with `bfloat_products`
    Raises OSError when the file cannot be loaded or has another interface.
    """

    def __init__(self, path: Path) -> None:
        # One library, opened twice: ctypes decides about the interpreter's lock by how it was opened.
        self._free = _opened(ctypes.CDLL, path)
        self._held = _opened(ctypes.PyDLL, path)
        self.linear = self._held.hp_linear
        self.linear_long = self._free.hp_linear
        self.plain_linear = self._held.hp_plain_linear
        self.plain_linear_long = self._free.hp_plain_linear
        self.bfloat_linear = self._held.hp_bfloat_linear
        self.bfloat_linear_long = self._free.hp_bfloat_linear
        self.lookup = self._held.hp_lookup
        self.rms_norm = self._held.hp_rms_norm
        self.layer_norm = self._held.hp_layer_norm
        self.rotate = self._held.hp_rotate
        self.activate = self._held.hp_activate
        self.attention = self._free.hp_attention
        self.draw = self._free.hp_draw
        self.log_sums = self._free.hp_log_sums
        self.run = self._free.hp_run
        self.pack = self._free.hp_pack
        self.packed_bytes = self._held.hp_packed_bytes

    @property
    def isas(self) -> list[str]:
        """The instruction sets this processor can use, best first."""
        return self._held.hp_isas().decode().split(",")

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._held.hp_isa().decode()

    def use_isa(self, name: str) -> None:
        """Choose an instruction set; ConfigError when this processor lacks it."""
        if self._held.hp_use_isa(name.encode()):
            raise ConfigError(
                f"the CPU kernels cannot use {name!r} on this processor",
                code="env-value",
                origin="HARDPOINT_CPU_KERNELS",
                fix=f"use auto, off or one of {', '.join(self.isas)}",
            )

    @property
    def bfloat_products(self) -> bool:
        """Whether the instruction set in use has products of bfloat16 numbers on this processor."""
        return bool(self._held.hp_bfloat_products())

    @property
    def threads(self) -> int:
        """Threads that compute, the caller among them."""
        return self._held.hp_threads()

    def set_threads(self, number: int, cores: Sequence[int] | None = None) -> None:
        """Compute with this many threads, the caller the first of them.

        cores  one each, to which the threads are bound; without it they may use the processors the caller may use
        """
        places = None if cores is None else (c_int32 * number)(*cores[:number])
        self._free.hp_set_threads(number, places)


def _opened(how: Any, path: Path) -> Any:
    library = how(str(path))
    # First of all: another interface may lack functions that are to be declared.
    found = library.hp_abi() if hasattr(library, "hp_abi") else "of no known version"
    if found != ABI:
        raise OSError(f"{path} has interface {found}, this version of Hardpoint wants {ABI}")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def kernels() -> Library | None:
    """The kernels, loaded once; None when there are none or HARDPOINT_CPU_KERNELS is off."""
    wanted = envs.HARDPOINT_CPU_KERNELS
    if wanted == "off":
        logger.info("the CPU kernels are switched off (HARDPOINT_CPU_KERNELS=off): layers compute in torch")
        return None
    if not PATH.is_file():
        logger.warning(
            "the CPU kernels were not built: layers compute in torch, which is slower and keeps weights in float32. "
            "Install a C++20 compiler (g++ 11 or clang 14, or newer) and reinstall Hardpoint."
        )
        return None
    try:
        library = Library(PATH)
    except OSError as error:
        logger.warning("the CPU kernels cannot be loaded, layers compute in torch: %s. Reinstall Hardpoint.", error)
        return None
    if wanted != "auto":
        library.use_isa(wanted)
    return library
