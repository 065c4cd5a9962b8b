"""`hardpoint bench latency`, `throughput` and `startup` on a tiny model."""

from __future__ import annotations

import json

import pytest

from hardpoint.cli.bench.engine import without_flags
from hardpoint.cli.main import main


@pytest.fixture
def bench(tiny_llama, tmp_path, monkeypatch):
    """Runs a measurement on the tiny model and returns the JSON it wrote."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def run(name, *words):
        out = tmp_path / "out.json"
        engine = ["--model", str(tiny_llama), "--max-model-len", "128", "--kv-cache-memory-bytes", "64M"]
        assert main(["bench", name, *engine, "--output-json", str(out), *words]) == 0
        return json.loads(out.read_text())

    return run


def test_latency(bench, capsys):
    words = ["--input-len", "4", "--output-len", "3", "--batch-size", "2", "--num-iters", "3"]
    result = bench("latency", *words, "--num-iters-warmup", "1")
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])
    assert "mean latency, s" in capsys.readouterr().out


def test_throughput(bench):
    result = bench("throughput", "--num-prompts", "3", "--input-len", "5", "--output-len", "4", "--n", "2")
    assert result["num_requests"] == 3
    generated = result["output_tokens_per_second"] * result["elapsed_time"]
    assert generated == pytest.approx(3 * 2 * 4)
    # Text made of random tokens is of about the asked length.
    assert 3 * 3 <= result["total_num_tokens"] - generated <= 3 * 8


def test_startup(bench, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    result = bench("startup", "--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    for kind in ("cold", "warm"):
        [ready], [first] = result[f"{kind}_startup_times"], result[f"{kind}_first_token_times"]
        assert 0 < ready < first
        assert result[f"avg_{kind}_startup_time"] == ready


def test_a_start_that_fails_says_why(tiny_llama, capsys):
    words = ["--model", str(tiny_llama), "--max-model-len", "99999999", "--num-iters-cold", "1"]
    assert main(["bench", "startup", *words]) == 1
    assert "max_model_len" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_nonsense_is_refused_before_an_engine_is_made(name, capsys):
    assert main(["bench", name, "--n", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_flags_are_taken_out_of_a_command_line():
    words = ["--num_iters-cold", "3", "--a", "b", "--model=x", "--model", "y", "--c"]
    assert without_flags(words, ("--num-iters-cold", "--model")) == ["--a", "b", "--c"]
