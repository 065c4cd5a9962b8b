"""The kinds of device and of processor, and what compares two devices of a kind."""

from __future__ import annotations

import enum
import platform as host
from typing import NamedTuple


class PlatformEnum(enum.Enum):
    """The kinds of platform; a plugin's is OOT."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    TPU = enum.auto()
    XPU = enum.auto()
    CPU = enum.auto()
    OOT = enum.auto()
    UNSPECIFIED = enum.auto()


class CpuArchEnum(enum.Enum):
    """Processor families."""

    X86 = enum.auto()
    ARM = enum.auto()
    POWERPC = enum.auto()
    S390X = enum.auto()
    RISCV = enum.auto()
    OTHER = enum.auto()
    UNKNOWN = enum.auto()


class DeviceCapability(NamedTuple):
    """A compute capability such as 9.0."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """`9.0`."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """`90`."""
        return self.major * 10 + self.minor

    @classmethod
    def of(cls, value: tuple[int, int] | int) -> DeviceCapability:
        """From (9, 0) or 90."""
        return cls(*value) if isinstance(value, tuple) else cls(*divmod(value, 10))


def cpu_architecture() -> CpuArchEnum:
    """The host's processor family."""
    machine = host.machine().lower()
    if machine in ("x86_64", "amd64", "i386", "i686"):
        return CpuArchEnum.X86
    if machine.startswith(("arm", "aarch")):
        return CpuArchEnum.ARM
    for prefix, family in (("ppc", "POWERPC"), ("s390", "S390X"), ("riscv", "RISCV")):
        if machine.startswith(prefix):
            return CpuArchEnum[family]
    return CpuArchEnum.OTHER if machine else CpuArchEnum.UNKNOWN
