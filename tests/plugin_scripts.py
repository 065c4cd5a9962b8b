"""Scripts run in a process of their own, with plugins; they answer with `answer(...)`, a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hardpoint.testing import Plugin, plugin_environment

PRELUDE = """
import json, os, sys
from hardpoint import LLM, EngineArgs, SamplingParams
from hardpoint.extensions.boot import load_general_plugins
from hardpoint.extensions.ledger import ledger

load_general_plugins()

def answer(value):
    print("ANSWER", json.dumps(value), flush=True)

def tokens(llm, count=6):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([[5, 300, 17, 99]], params, use_tqdm=False)[0].outputs[0].token_ids)

def events(key, *kinds):
    found = (e for e in ledger.entries(key=key) if not kinds or e.kind in kinds)
    return [[e.kind, e.name, e.detail, e.fix, e.origin.label] for e in found]
"""


@dataclass(frozen=True)
class Done:
    """answers  what the script answered, in order      output  all else that it wrote"""

    answers: list[Any]
    output: str


def run_script(source: str, plugins: Iterable[Plugin], *arguments: object, status: int = 0, **variables: str) -> Done:
    """Run a script after PRELUDE, its engine inside its own process unless a variable says otherwise."""
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + source, *map(str, arguments)],
        env=plugin_environment(plugins, **{**settings, **variables}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    answers, output = [], []
    for line in done.stdout.splitlines():
        if line.startswith("ANSWER "):
            answers.append(json.loads(line.removeprefix("ANSWER ")))
        else:
            output.append(line)
    return Done(answers, "\n".join(output))
