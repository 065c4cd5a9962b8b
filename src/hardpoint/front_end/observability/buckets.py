"""Histogram bounds by family; `--custom-histogram-buckets` replaces a family's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from hardpoint.errors import ConfigError

# fmt: off
FAMILIES: dict[str, tuple[float, ...]] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
        1920.0, 7680.0,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
    "request_tokens": (),  # follows the context length, see request_tokens()
    "kv_cache_residency": (
        0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
    ),
}
# fmt: on


def request_tokens(max_value: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... up to `max_value`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_value:
                return bounds or [1]
            bounds.append(step * scale)
        scale *= 10


def families(max_model_len: int, custom: Mapping[str, Sequence[float]] | None) -> dict[str, list[float]]:
    """Bounds of every family for one engine.

    Raises ConfigError for an unknown family or bounds that do not rise.
    """
    chosen = {name: list(bounds) for name, bounds in FAMILIES.items()}
    chosen["request_tokens"] = request_tokens(max_model_len)
    for name, bounds in (custom or {}).items():
        if name not in FAMILIES:
            raise ConfigError(
                f"--custom-histogram-buckets names {name!r}, which is no family",
                code="flag-value",
                origin="--custom-histogram-buckets",
                fix=f"the families are {', '.join(FAMILIES)}",
            )
        if not bounds or any(b <= a for a, b in pairwise(bounds)):
            raise ConfigError(
                f"--custom-histogram-buckets: the bounds of {name!r} must be rising numbers",
                code="flag-value",
                origin="--custom-histogram-buckets",
            )
        chosen[name] = [float(bound) for bound in bounds]
    return chosen
