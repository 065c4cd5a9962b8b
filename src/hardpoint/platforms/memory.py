"""Memory facts of this machine in bytes, seen from inside a container if we are in one."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
# Kernels write "no limit" as a number near 2^63.
_UNLIMITED = 1 << 60


def total_bytes() -> int:
    """Memory that this process may use at most."""
    found = [size for size in (_meminfo("MemTotal"), _cgroup()[0]) if size]
    return min(found) if found else _sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Memory that is free now, or could be freed by dropping file caches."""
    limit, used = _cgroup()
    found = [size for size in (_meminfo("MemAvailable"), max(0, limit - used) if limit else 0) if size]
    return min(found) if found else _sysconf("SC_AVPHYS_PAGES")


def resident_bytes() -> int:
    """Memory that this process holds."""
    fields = _read("/proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _meminfo(name: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup() -> tuple[int, int]:
    """Return (limit, used); the limit is 0 where there is none."""
    for limit_file, used_file in _CGROUP_LIMITS:
        limit, used = _read(limit_file).strip(), _read(used_file).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            return int(limit), int(used)
    return 0, 0


def _sysconf(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 8 << 30
