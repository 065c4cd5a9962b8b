"""`hardpoint run-batch` as a command, on a real engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from process_tools import wait_until


@pytest.fixture
def batch(tiny_llama, tmp_path):
    """Begin the command over these requests; gives the process and the output's path."""

    def start(lines: list[str], *flags: str):
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(lines))
        command = [
            sys.executable,
            "-m",
            "hardpoint",
            "run-batch",
            str(tiny_llama),
            "-i",
            str(source),
            "-o",
            str(output),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        process = subprocess.Popen(
            [*command, "--served-model-name", "m", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        return process, output

    return start


def completion(custom_id: str, **body) -> str:
    body = {"model": "m", "prompt": "A server", "temperature": 0, "max_tokens": 4, "ignore_eos": True, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def entries(path) -> dict:
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_each_line_gets_what_the_server_would_answer(batch):
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    lines = [
        completion("first"),
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        "not json",
        completion("wrong", max_tokens=-1),
        completion("again"),
    ]
    process, output = batch(lines)
    log, _ = process.communicate(timeout=200)
    assert process.returncode == 0, log
    assert "3 requests answered, 2 refused or failed" in log
    found = entries(output)
    assert set(found) == {"first", "chat", None, "wrong", "again"}
    first, again = (found[name]["response"]["body"]["choices"][0]["text"] for name in ("first", "again"))
    assert first == again
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert found["wrong"]["response"]["status_code"] == 400
    assert "line 3" in found[None]["error"]["message"]


def test_an_interrupted_batch_goes_on_where_it_ended(batch, tmp_path):
    # The last one never ends by itself before the signal comes.
    lines = [completion(f"r{number}") for number in range(3)] + [completion("long", max_tokens=200, n=16)]
    process, output = batch(lines, "--max-num-seqs", "1")

    def three_are_done() -> bool:
        parts = list(tmp_path.glob("out.jsonl.*.partial"))
        return bool(parts) and parts[0].read_bytes().count(b"\n") >= 3

    assert wait_until(lambda: three_are_done() or process.poll() is not None, 120)
    process.send_signal(signal.SIGTERM)
    log, _ = process.communicate(timeout=200)
    assert process.returncode == 130, log
    assert not output.exists()

    process, output = batch(lines, "--max-num-seqs", "16")
    log, _ = process.communicate(timeout=200)
    assert process.returncode == 0, log
    assert "3 results of an earlier run are kept" in log
    assert set(entries(output)) == {"r0", "r1", "r2", "long"}
    assert all(entry["response"]["status_code"] == 200 for entry in entries(output).values())
