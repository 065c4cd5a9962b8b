"""`import vllm...` inside our processes: an alias onto our own classes. See `table` and `finder`."""

from __future__ import annotations

from hardpoint.compat.finder import install, uninstall

__all__ = ["install", "uninstall"]
