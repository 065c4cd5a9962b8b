"""How far quantised arithmetic is from float32 on the same weights: Hardpoint's int8 activations, and llama.cpp's.

    python bench/peers/divergence.py [--folder DIR] [--files smollm2-q4_1 ...] [--chunks 12] [--out results.json]

The text is this repository's own pages. llama.cpp's perplexity tool cuts it into chunks of 512 tokens and writes its
log-probabilities for the second half of each, as 16-bit steps over the best 16 nats; Hardpoint computes the same chunks
twice, as it serves the file and with `--dtype float32`, and its log-probabilities are rounded in the same way. The
divergence is KL(float32 || quantised) over those tokens, averaged over positions.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from install import DEFAULT_FOLDER, llama_tool
from models import TYPES, model_file

# The model is asked in this process, where its logits can be taken as they are made.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
CONTEXT = 512
FIRST = CONTEXT // 2
_NATS, _STEPS = 16.0, 65535.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Chunks:
    """What the perplexity tool wrote.

    tokens  [chunks, CONTEXT]
    scores  [chunks, CONTEXT - 1 - FIRST, vocabulary + 4 (two floats before)] uint16, mapped from the file
    """

    tokens: np.ndarray
    scores: np.ndarray
    vocabulary: int

    def log_probs(self, chunk: int) -> np.ndarray:
        """[positions, vocabulary] float32"""
        rows = np.ascontiguousarray(self.scores[chunk])
        scale, lowest = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
        return rows[:, 4 : 4 + self.vocabulary] * scale[:, None] + lowest[:, None]


def text(folder: Path) -> Path:
    """This repository's pages in one file."""
    docs = _ROOT / "docs"
    pages = [_ROOT / "README.md", *sorted(docs.glob("*.md")), *sorted((docs / "decisions").glob("*.md"))]
    target = folder / "divergence.txt"
    target.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    return target


def llama_chunks(folder: Path, file: Path, chunks: int, threads: int) -> Chunks:
    """Run llama.cpp's perplexity tool and read what it wrote."""
    out = folder / "divergence.kld"
    command = [llama_tool(folder, "llama-perplexity"), "-m", file, "-f", text(folder), "-c", CONTEXT, "-b", CONTEXT]
    command += ["-t", threads, "--chunks", chunks, "--kl-divergence-base", out]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with out.open("rb") as data:
        magic, context, vocabulary, count = struct.unpack("<8siii", data.read(20))
        if magic != b"_logits_" or context != CONTEXT:
            raise SystemExit(f"{out} is not what was expected")
        tokens = np.fromfile(data, np.int32, count * CONTEXT).reshape(count, CONTEXT)
        begins = data.tell()
    width = 2 * ((vocabulary + 1) // 2) + 4
    scores = np.memmap(out, np.uint16, "r", begins, (count, CONTEXT - 1 - FIRST, width))
    return Chunks(tokens, scores, vocabulary)


class Scores:
    """An engine whose logits are kept as it makes them."""

    def __init__(self, file: Path, dtype: str) -> None:
        from hardpoint import LLM

        limits = {"max_model_len": 1024, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 1 << 28}
        self.llm = LLM(str(file), dtype=dtype, enable_prefix_caching=False, **limits)
        self.rows: list[np.ndarray] = []
        self.llm.apply_model(self._listen)

    def _listen(self, model: Any) -> None:
        compute = model.compute_logits

        def listening(*words: Any, **more: Any) -> Any:
            logits = compute(*words, **more)
            self.rows.append(logits.float().numpy().copy())
            return logits

        model.compute_logits = listening

    def log_probs(self, tokens: list[int]) -> np.ndarray:
        """[positions, vocabulary] float32 for the second half of a chunk."""
        from hardpoint import SamplingParams

        self.rows.clear()
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        self.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        # One row alone is the one the next token is drawn from.
        rows = np.concatenate([rows for rows in self.rows if len(rows) > 1])
        if len(rows) != CONTEXT - 1:
            raise SystemExit(f"{len(rows)} rows of logits instead of {CONTEXT - 1}")
        logits = rows[FIRST:].astype(np.float64)
        best = logits.max(1, keepdims=True)
        total = best + np.log(np.exp(logits - best).sum(1, keepdims=True))
        return (logits - total).astype(np.float32)


def rounded(log_probs: np.ndarray) -> np.ndarray:
    """As the perplexity tool rounds its own."""
    best = log_probs.max(1, keepdims=True)
    lowest = np.maximum(log_probs.min(1, keepdims=True), best - _NATS)
    scale = (best - lowest) / _STEPS
    return np.rint((np.maximum(log_probs, lowest) - lowest) / scale) * scale + lowest


def divergence(exact: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(exact || other) of each row, in nats, over the tokens that `other` has within its best 16 nats.

    A part of two distributions does not sum to one, so it is the form for such that is never negative:
    p log(p / q) - p + q.
    """
    wide, rough = exact.astype(np.float64), other.astype(np.float64)
    known = rough > rough.min(1, keepdims=True)
    p, q = np.exp(wide), np.exp(rough)
    return ((p * (wide - rough) - p + q) * known).sum(1)


def summary(values: list[np.ndarray], same: list[np.ndarray]) -> dict[str, float]:
    """What is told of one side."""
    found = np.concatenate(values)
    return {
        "mean": float(found.mean()),
        "median": float(np.median(found)),
        "p99": float(np.percentile(found, 99)),
        "same": float(np.concatenate(same).mean()),
    }


def measure(folder: Path, name: str, chunks: int, threads: int) -> dict[str, Any]:
    """The divergence of both sides on one file."""
    file = model_file(folder, name)
    theirs = llama_chunks(folder, file, chunks, threads)
    exact, ours = Scores(file, "float32"), Scores(file, "auto")
    names = ("Hardpoint", "llama.cpp")
    values: dict[str, list[np.ndarray]] = {name: [] for name in names}
    same: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number, tokens in enumerate(theirs.tokens.tolist()):
        reference = exact.log_probs(tokens)
        for side, found in zip(names, (rounded(ours.log_probs(tokens)), theirs.log_probs(number)), strict=True):
            values[side].append(divergence(reference, found))
            same[side].append(reference.argmax(1) == found.argmax(1))
    positions = sum(map(len, values["Hardpoint"]))
    return {"positions": positions, "file": name, "kl": {side: summary(values[side], same[side]) for side in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--files", nargs="+", choices=list(TYPES), default=["smollm2-q4_1"])
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="add to this JSON, which table.py writes; default as there")
    options = parser.parse_args()
    out = options.out or options.folder / "results.json"
    for name in options.files:
        started = time.perf_counter()
        row = measure(options.folder, name, options.chunks, options.threads)
        for side, found in row["kl"].items():
            figures = "  ".join(f"{key} {value:.3g}" for key, value in found.items())
            print(f"{name:<14}{side:<12}{figures}  ({row['positions']} positions)")
        if out.exists():
            results = json.loads(out.read_text())
            results["rows"][f"divergence/{name}"] = row
            results["seconds"][f"divergence/{name}"] = time.perf_counter() - started
            out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
