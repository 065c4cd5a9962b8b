"""Time the CPU kernels' linear layers beside torch's float32, pair by pair, and print medians.

python bench/linear.py [--rows 1536 --columns 576] [--types Q4_1 Q8_0] [--tokens 1 8 128] [--threads 1] [--pairs 15]
With `--plain` weights stay where torch has them, and torch computes in the same type.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import gguf
import numpy as np
import torch

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType
from hardpoint.worker.kernels import plain
from hardpoint.worker.kernels.library import Library, kernels
from hardpoint.worker.kernels.packed import PackedLinear, PackedMatrix
from hardpoint.worker.loaders.stored import StoredTensor
from hardpoint.worker.quantization.ggml import dequantize

# What the `gguf` package can write.
_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Time a measurement should take, so that the clock's steps do not matter.
_SECONDS = 0.02


def layer_of(library: Library, kind: GGMLType, values: np.ndarray) -> PackedLinear:
    raw = gguf.quantize(values, gguf.GGMLQuantizationType(int(kind))).view(np.uint8).reshape(len(values), -1)
    stored = StoredTensor(raw, values.shape, lambda rows: dequantize(rows, kind), None, (int(kind), *BLOCK_SIZES[kind]))
    return PackedLinear([PackedMatrix.of(library, stored)])


def seconds(call: Callable[[], object], repeats: int) -> float:
    # With one thread its processor time counts, which says the same on a machine with other work.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(repeats):
        call()
    return (clock() - started) / repeats


def compare(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the pairs' ratios."""
    repeats = [max(1, int(_SECONDS / max(1e-7, seconds(call, 1)))) for call in (ours, theirs)]
    measured = [(seconds(ours, repeats[0]), seconds(theirs, repeats[1])) for _ in range(pairs)]
    first, second = zip(*measured, strict=True)
    return statistics.median(first), statistics.median(second), statistics.median(b / a for a, b in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1536)
    parser.add_argument("--columns", type=int, default=576)
    parser.add_argument("--types", nargs="+", choices=_TYPES, default=["Q4_0", "Q4_1", "Q8_0", "F16"])
    parser.add_argument("--plain", action="store_true", help="weights that are not packed")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 128])
    parser.add_argument("--isas", nargs="+", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    library = kernels()
    if library is None:
        raise SystemExit("the CPU kernels are not there")
    torch.set_num_threads(options.threads)
    library.set_threads(options.threads)
    values = np.random.default_rng(0).normal(0, 1, (options.rows, options.columns)).astype(np.float32)
    dense = torch.from_numpy(values)
    tiny = layer_of(library, GGMLType.Q8_0, values[:16, :32])
    one = torch.zeros(1, 32)
    smallest = seconds(lambda: tiny(one), 2000) * 1e6
    print(f"{options.rows} x {options.columns}, {options.threads} thread(s); smallest call {smallest:.1f} us")
    print(f"{'type':<6}{'set':<9}{'tokens':>7}{'kernel G/s':>12}{'torch G/s':>11}{'ratio':>8}")
    for name in options.types:
        dtype = _PLAIN[name] if options.plain else torch.float32
        weight = dense.to(dtype)
        layer = partial(plain.linear, weight=weight) if options.plain else layer_of(library, GGMLType[name], values)
        for isa in options.isas or library.isas[:2]:
            library.use_isa(isa)
            for tokens in options.tokens:
                x = torch.randn(tokens, options.columns).to(dtype)
                ours, theirs, ratio = compare(
                    partial(layer, x), partial(torch.nn.functional.linear, x, weight), options.pairs
                )
                products = tokens * values.size / 1e9
                print(f"{name:<6}{isa:<9}{tokens:>7}{products / ours:>12.1f}{products / theirs:>11.1f}{ratio:>8.2f}")


if __name__ == "__main__":
    main()
