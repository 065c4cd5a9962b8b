"""The measured rows as text: one line while they come, and the tables of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- begin measured -->", "<!-- end measured -->"
FILES = {
    "smollm2-q4_1": "SmolLM2-135M Q4_1 (the default model)",
    "smollm2-q4_0": "SmolLM2-135M Q4_0",
    "smollm2-q8_0": "SmolLM2-135M Q8_0",
    "wide-q4_k_m": "hidden size 1024, Q4_K_M",
    "wide-q4_0": "hidden size 1024, Q4_0",
    "wide-q8_0": "hidden size 1024, Q8_0",
    "vllm": "vLLM's CPU build (bfloat16) against Hardpoint (Q4_1)",
    "transformers": "transformers (bfloat16) against Hardpoint (Q4_1)",
}
# The least ratio that is aimed for: (file, beginning of the load) -> ratio; other files against llama.cpp 1.1.
BARS = {
    ("smollm2-q4_1", "decode"): 1.5,
    ("smollm2-q4_1", "prefill of 500"): 4.0,
    ("smollm2-q4_1", "8 streams"): 5.0,
    ("smollm2-q4_1", "16 streams"): 5.0,
    ("vllm", "16 streams"): 6.0,
}


def brief(row: dict[str, Any]) -> str:
    """One row on one line."""
    if "ratio" in row:
        spread = f"{row['lowest']:.2f} to {row['highest']:.2f}"
        return (
            f"{row['ours']:9.1f} : {row['theirs']:9.1f} {row['unit']}  x {row['ratio']:.2f} ({spread})"
            f"  others {100 * row['others']:.0f} %"
        )
    if "slower" in row:
        return "  ".join(f"{name} {value:.2f} times slower" for name, value in row["slower"].items())
    if "seconds" in row:
        return "  ".join(f"{name} {_median(taken):.2f} s" for name, taken in row["seconds"].items())
    if "kl" in row:
        return "  ".join(f"{name} {value['mean']:.5f}" for name, value in row["kl"].items())
    return f"pss {row['ours']['pss']:.0f} : {row['theirs']['pss']:.0f} MB"


def bar_of(file: str, load: str) -> float | None:
    """The ratio that is aimed for, if there is one."""
    for (name, begins), bar in BARS.items():
        if name == file and load.startswith(begins):
            return bar
    return 1.1 if file.startswith(("smollm2-q4_0", "smollm2-q8", "wide")) else None


def markdown(results: dict[str, Any]) -> str:
    """All tables."""
    rows, machine, options = results["rows"], results["machine"], results["options"]
    parts = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, {options['threads']} threads on "
        f"every side; {options['at']}. Medians of {options['pairs']} pairs measured turn about; the spread is the "
        "lowest and the highest ratio of a pair.",
    ]
    noise = max((row["others"] for row in rows.values() if "others" in row), default=0.0)
    if noise > 0.05:
        parts.append(
            f"**The machine was not idle**: other processes used up to {100 * noise:.0f} % of it while a row was "
            "measured (last column)."
        )
    for file, title in FILES.items():
        own = {key.split("/", 1)[1]: row for key, row in rows.items() if key.startswith(f"{file}/")}
        if own:
            parts.append(_ratios(file, title, own))
    parts += [make(rows) for make in (_start, _memory, _neighbour, _divergence)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _ratios(file: str, title: str, rows: dict[str, Any]) -> str:
    peer = next(iter(rows.values()))["peer"]
    lines = [
        f"**{title}**",
        "",
        f"| | Hardpoint | {peer} | ratio | spread | aim | others |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for load, row in rows.items():
        aim = bar_of(file, load)
        mark = "" if aim is None else f"{aim:g}" + ("" if row["ratio"] >= aim else " (missed)")
        lines.append(
            f"| {load}, {row['unit']} | {row['ours']:.1f} | {row['theirs']:.1f} | **{row['ratio']:.2f}** "
            f"| {row['lowest']:.2f} to {row['highest']:.2f} | {mark} | {100 * row['others']:.0f} % |"
        )
    return "\n".join(lines)


def _start(rows: dict[str, Any]) -> str:
    row = rows.get("start to first token")
    if row is None:
        return ""
    lines = ["**Start to the first token**, seconds", "", "| | median | lowest | highest |", "|---|--:|--:|--:|"]
    for name, taken in row["seconds"].items():
        lines.append(f"| {name} | {_median(taken):.2f} | {min(taken):.2f} | {max(taken):.2f} |")
    lines += [
        "",
        f"Hardpoint takes {row['over_import_torch_s']:.2f} s more than importing torch alone (aim: at most 2).",
    ]
    return "\n".join(lines)


def _memory(rows: dict[str, Any]) -> str:
    row = rows.get("memory")
    if row is None:
        return ""
    ours, theirs = row["ours"], row["theirs"]
    lines = [
        "**Memory** of all processes of a server after 16 streams, room for 16 x 1,024 tokens, MB",
        "",
        "| | Hardpoint | llama.cpp | ratio |",
        "|---|--:|--:|--:|",
    ]
    names = {"pss": "proportional (PSS)", "rss": "resident (RSS)", "pss_torch": "of PSS, torch's libraries"}
    names |= {"rss_torch": "of RSS, torch's libraries", "pss_model_file": "of PSS, the model's file"}
    for key, name in names.items():
        if key not in ours:
            continue
        ratio = f"{ours[key] / theirs[key]:.2f}" if min(ours[key], theirs[key]) > 0 else ""
        lines.append(f"| {name} | {ours[key]:.0f} | {theirs[key]:.0f} | {ratio} |")
    return "\n".join(lines)


def _neighbour(rows: dict[str, Any]) -> str:
    own = {key.split("/", 1)[1]: row["slower"] for key, row in rows.items() if key.startswith("busy neighbour/")}
    if not own:
        return ""
    lines = [
        "**A busy neighbour**: times slower while another process spins on one core",
        "",
        "| | Hardpoint | llama.cpp |",
        "|---|--:|--:|",
    ]
    lines += [f"| {load} | {row['hardpoint']:.2f} | {row['llama.cpp']:.2f} |" for load, row in own.items()]
    return "\n".join(lines)


def _divergence(rows: dict[str, Any]) -> str:
    own = {key.split("/", 1)[1]: row for key, row in rows.items() if key.startswith("divergence/")}
    if not own:
        return ""
    positions = next(iter(own.values()))["positions"]
    lines = [
        f"**Divergence** from float32 arithmetic on the same weights, nats, over {positions} positions of this "
        "repository's pages",
        "",
        "| | | mean KL | median KL | 99th percentile | same best token |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for file, row in own.items():
        for name, found in row["kl"].items():
            figures = f"{found['mean']:.2g} | {found['median']:.2g} | {found['p99']:.2g} | {100 * found['same']:.1f} %"
            lines.append(f"| {FILES[file]} | {name} | {figures} |")
    return "\n".join(lines)


def put(page: Path, text: str) -> None:
    """Replace what is between the markers of a page. Raises ValueError where it has none."""
    old = page.read_text(encoding="utf-8")
    head, begun, rest = old.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"{page} has no markers {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
