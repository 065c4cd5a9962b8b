"""What plugins that do nothing cost: at boot, and per token.

    python bench/plugin_cost.py [--rounds 9] [--model smollm2-135m-instruct] [--json out.json]

Boot: a process role boots with no plugin and with 50 trivial general plugins, turn about.
Tokens: two engines side by side generate the same batch in turn; one has a stat logger and a logits
processor that do nothing. On a shared machine single pairs differ by a tenth and more, so the cost of a
step is measured too: two engines in this process, of a tiny model with the vocabulary of the real one,
where a step is short and the difference is what the processor costs. All figures are medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hardpoint.testing import make_plugin

COUNT = 50

NOOP = """
from hardpoint.contracts.logits_processor import LogitsProcessorV2
from hardpoint.contracts.stat_logger import StatLoggerBase


class Quiet(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        pass

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        pass

    def log_engine_initialized(self):
        pass


class Idle(LogitsProcessorV2):
    def __init__(self, vllm_config, req_states):
        pass

    def add_request(self, req_idx, sampling_params):
        return True

    def apply(self, logits, ctx):
        return logits
"""

BOOT = """
import time
from hardpoint.extensions.boot import boot
from hardpoint.extensions.rows import Role
started = time.perf_counter()
boot(Role.ENGINE_CORE)
print(time.perf_counter() - started)
"""

ENGINE = """
import sys, time
from hardpoint import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=512)
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
prompts = [f"Story number {i}: once upon a time" for i in range(8)]
print("ready", flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    print(time.perf_counter() - started, flush=True)
"""


STEP = """
import os, statistics, sys, tempfile, time
from pathlib import Path
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from noop import Idle
from hardpoint import LLM, SamplingParams
from hardpoint.testing import write_tiny_llama
folder = Path(tempfile.mkdtemp()) / "tiny"
write_tiny_llama(folder, vocab_size=49152)
plain = LLM(str(folder), kv_cache_memory_bytes=64 << 20)
loaded = LLM(str(folder), kv_cache_memory_bytes=64 << 20, logits_processors=[Idle])
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
prompts = [{"prompt_token_ids": [20 + i, 21, 22]} for i in range(8)]

def step_ms(llm):
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return (time.perf_counter() - started) / 200 * 1000

step_ms(plain), step_ms(loaded)
differences = []
for turn in range(int(sys.argv[1])):
    order = [plain, loaded] if turn % 2 else [loaded, plain]
    taken = {id(llm): step_ms(llm) for llm in order}
    differences.append(taken[id(loaded)] - taken[id(plain)])
print(statistics.median(differences))
"""


def step_cost_ms(folder: Path, rounds: int) -> float:
    """Milliseconds that a no-op logits processor adds to a step of 8 rows."""
    # The processor is given by name, not found as an entry point, so that one of the two engines lacks it.
    variables = dict(environment(folder), VLLM_LOGGING_LEVEL="ERROR", HARDPOINT_PLUGINS_DENY="noop")
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(rounds)], env=variables, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that finds the plugins of a folder."""
    return dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def boot_s(folder: Path) -> float:
    """Seconds `boot` takes in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", BOOT], env=environment(folder), capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


class Engine:
    """An engine in a process of its own that generates one batch when told to."""

    def __init__(self, model: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, model],
            env=dict(environment(folder), VLLM_LOGGING_LEVEL="ERROR"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.line()

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def batch_s(self) -> float:
        """Seconds one batch takes."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.line())

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def main() -> None:
    """Measure turn about and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        empty, many, noop = (Path(root) / name for name in ("empty", "many", "noop"))
        empty.mkdir()
        for i in range(COUNT):
            entry = {"vllm.general_plugins": {f"trivial_{i}": f"trivial_{i}:register"}}
            make_plugin(many, f"trivial_{i}", "def register(): pass\n", entry)
        groups = {"vllm.stat_logger_plugins": "Quiet", "vllm.logits_processors": "Idle"}
        make_plugin(noop, "noop", NOOP, {group: {"noop": f"noop:{name}"} for group, name in groups.items()})
        boots = [(boot_s(empty), boot_s(many)) for _ in range(args.rounds + 1)][1:]
        plain, loaded = Engine(args.model, empty), Engine(args.model, noop)
        pairs = []
        for turn in range(args.rounds + 1):
            order = [plain, loaded] if turn % 2 else [loaded, plain]
            taken = {engine: engine.batch_s() for engine in order}
            if turn:  # the first round warms both
                pairs.append((taken[plain], taken[loaded]))
        added_ms = step_cost_ms(noop, 2 * args.rounds)
        plain.close()
        loaded.close()
    more_ms = statistics.median(1000 * (b - a) for a, b in boots)
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"boot with {COUNT} trivial plugins: {more_ms:+.1f} ms (median of {len(boots)} pairs)")
    print(f"batch time with a no-op stat logger and logits processor: x {ratio:.4f} (median of {len(pairs)} pairs)")
    step_ms = statistics.median(a for a, _ in pairs) / 32 * 1000
    print(f"a step of 8 rows: {added_ms:+.3f} ms more, of {step_ms:.0f} ms ({100 * added_ms / step_ms:+.2f} %)")
    if args.json:
        args.json.write_text(json.dumps({"boot_s": boots, "batch_s": pairs, "at": time.time()}, indent=1))


if __name__ == "__main__":
    main()
