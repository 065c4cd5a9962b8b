"""Draw what table.py measured.

python bench/peers/plots.py [--results results.json] [--into docs/pictures]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from install import DEFAULT_FOLDER
from report import FILES, bar_of

matplotlib.use("svg")
# The same drawing gives the same file.
matplotlib.rcParams["svg.hashsalt"] = "hardpoint"
from matplotlib import pyplot  # noqa: E402 - after the choice of the backend

_OURS, _THEIRS, _AIM = "#1f6f8b", "#c9a227", "#a02c2c"


def rows_of(results: dict[str, Any], file: str) -> dict[str, Any]:
    """The rows of one file that have a ratio."""
    found = {key.split("/", 1)[1]: row for key, row in results["rows"].items() if key.startswith(f"{file}/")}
    return {load: row for load, row in found.items() if "ratio" in row}


def ratios(results: dict[str, Any], target: Path) -> None:
    """Every ratio with its spread, a panel for each file, and the aims as lines."""
    files = [file for file in FILES if rows_of(results, file)]
    if not files:
        return
    heights = [len(rows_of(results, file)) + 1.2 for file in files]
    figure, panels = pyplot.subplots(
        len(files), 1, figsize=(8, 0.36 * sum(heights)), height_ratios=heights, sharex=True, squeeze=False
    )
    for panel, file in zip(panels[:, 0], files, strict=True):
        rows = rows_of(results, file)
        for place, (load, row) in enumerate(reversed(rows.items())):
            spread = [[row["ratio"] - row["lowest"]], [row["highest"] - row["ratio"]]]
            panel.barh(place, row["ratio"], color=_OURS, height=0.6, xerr=spread, error_kw={"lw": 1, "capsize": 2})
            panel.text(row["highest"], place, f"  {row['ratio']:.2f}", va="center", fontsize=8)
            aim = bar_of(file, load)
            if aim is not None:
                panel.plot([aim, aim], [place - 0.4, place + 0.4], color=_AIM, lw=1.5)
        panel.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
        panel.set_title(FILES[file], fontsize=9, loc="left")
        panel.axvline(1, color="black", lw=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("times as fast as the peer; red: the aim")
    _save(figure, target)


def speeds(results: dict[str, Any], target: Path) -> None:
    """Tokens per second of both on the default model."""
    rows = rows_of(results, "smollm2-q4_1")
    if not rows:
        return
    figure, panel = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1))
    for place, row in enumerate(reversed(rows.values())):
        for shift, side, colour in ((0.2, "ours", _OURS), (-0.2, "theirs", _THEIRS)):
            panel.barh(place + shift, row[side], height=0.38, color=colour, label=side if place == 0 else None)
            panel.text(row[side], place + shift, f" {row[side]:.0f}", va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    panel.set_xlabel(f"tokens per second, {results['options']['threads']} threads")
    panel.legend(["Hardpoint", "llama.cpp"], fontsize=8, loc="lower right", frameon=False)
    panel.set_title(FILES["smollm2-q4_1"], fontsize=9, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    _save(figure, target)


def _save(figure: Any, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    pyplot.close(figure)
    print(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=DEFAULT_FOLDER / "results.json")
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[2] / "docs" / "pictures")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    ratios(results, options.into / "peers-ratios.svg")
    speeds(results, options.into / "peers-speeds.svg")


if __name__ == "__main__":
    main()
