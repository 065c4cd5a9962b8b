"""Four published plugins at once, as they are, on one server: each does what its users want from it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from downstream_packages import folder_of, python_path

from process_tools import wait_until
from server_process import ServerProcess, free_port

pytestmark = pytest.mark.server

WATERMARK = "vllm-sbw==1.0.0"
RECEIPTS = "vllm-openttt==0.1.0"
METRICS = "pping-lang==0.1.0"
LIFECYCLE = "vllm-hust-clm-lifecycle==0.1.1"

UNMARKED = {"vllm_xargs": {"delta": 0}}


@dataclass
class Notary:
    """Stands in for the service that seals hashes; knows no key."""

    asked: list[dict] = field(default_factory=list)
    url: str = ""


@pytest.fixture(scope="module")
def notary() -> Iterator[Notary]:
    book = Notary()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            book.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(403)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as service:
        book.url = f"http://127.0.0.1:{service.server_port}"
        threading.Thread(target=service.serve_forever, daemon=True).start()
        yield book
        service.shutdown()


@pytest.fixture(scope="module")
def metrics_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pping")


@pytest.fixture(scope="module")
def dashboard() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tiny_llama: Path, notary: Notary, metrics_folder: Path, dashboard: str) -> Iterator[ServerProcess]:
    variables = {
        "PYTHONPATH": python_path(WATERMARK, RECEIPTS, METRICS, LIFECYCLE),
        # The watermark's kernels run as they are written instead of being compiled for minutes.
        "TORCH_COMPILE_DISABLE": "1",
        "KPP_BASE": notary.url,
        "TTTPS_TIMEOUT_S": "30",
        "PPING_LANG_DISABLE_NVML": "1",
        "PPING_LANG_DISABLE_OTEL": "1",
        "PPING_LANG_DB_PATH": str(metrics_folder / "local.duckdb"),
        "PPING_LANG_FLUSH_INTERVAL_S": "0.1",
        "PPING_LANG_API_PORT": dashboard.rpartition(":")[2],
    }
    flags = ["--logits-processors", "vllm_sbw:SBWLogitsProcessor", "--middleware", "vllm_openttt.TTTPSMiddleware"]
    with ServerProcess(tiny_llama, *flags, env=variables) as running:
        yield running.wait_ready()


def body_of(answer: httpx.Response) -> dict:
    """What an answer says, without what differs from answer to answer."""
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created")}


# vllm-hust-clm-lifecycle: nothing to do where `vllm.v1.events` is absent


def test_lifecycle_is_loaded_and_called_where_it_belongs_and_stands_down(server):
    ledger = server.http.get("/plugins").json()["ledger"]
    its = [entry for entry in ledger if (entry["origin"] or {}).get("distribution") == "vllm-hust-clm-lifecycle"]
    assert [(e["kind"], e["role"]) for e in its] == [
        (kind, role) for role in ("front_end", "engine_core") for kind in ("discover", "load", "call")
    ]
    assert "clm-lifecycle: vllm.v1.events unavailable" in server.log()


# vllm-openttt: a receipt for each answer


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_receipt_says_degraded_without_a_key_and_leaves_the_body_alone(server, plain, notary, path):
    asking = {"prompt": "The"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"model": "m", "max_tokens": 12, "temperature": 0, **asking}
    answer = server.http.post(f"/v1/{path}", json={**body, **UNMARKED})
    assert body_of(answer) == body_of(plain.http.post(f"/v1/{path}", json=body))
    [choice] = answer.json()["choices"]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    receipt = json.loads(answer.headers["x-tttps-receipt"])
    assert answer.headers["x-tttps-status"] == receipt["status"] == "degraded"
    assert (receipt["reason"], receipt["content_hash"]) == ("unknown_api_key", digest)
    assert notary.asked[-1] == {"content_hash": digest, "key": ""}


def test_receipt_of_a_stream_is_none_and_it_arrives_in_pieces(server, plain):
    body = {"model": "m", "prompt": "The", "max_tokens": 12, "temperature": 0, "stream": True}

    def pieces(of: ServerProcess) -> list[str]:
        with of.http.stream("POST", "/v1/completions", json={**body, **UNMARKED}) as answer:
            assert answer.status_code == 200
            assert "x-tttps-receipt" not in answer.headers
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
        return [json.loads(event)["choices"][0]["text"] for event in events]

    told = pieces(server)
    assert "".join(told) == "".join(pieces(plain))
    assert len(told) > 3


def test_receipts_are_not_given_for_errors(server):
    answer = server.http.post("/v1/completions", json={"model": "m", "prompt": "The", "max_tokens": 0})
    assert answer.status_code == 400
    assert "x-tttps-receipt" not in answer.headers


# vllm-sbw: a watermark in the choice of tokens

DETECT = """
import json, sys, torch
from transformers import AutoTokenizer
from sbw import WatermarkDetector
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def judge(gamma, tokens):
    detector = WatermarkDetector(
        device=torch.device("cpu"), tokenizer=tokenizer, vocab=[0] * len(tokenizer), gamma=gamma,
        seeding_scheme="gpu-fused-selfhash-fullvocab", normalizers=[],
    )
    return float(detector.detect(tokenized_text=torch.tensor(tokens))["z_score"])
print(json.dumps([judge(*one) for one in json.load(sys.stdin)]))
"""


def z_scores(model: Path, *passages: tuple[float, list[int]]) -> list[float]:
    """The detector's score of each (gamma, tokens)."""
    done = subprocess.run(
        [sys.executable, "-c", DETECT, str(model)],
        input=json.dumps(passages),
        env={"PYTHONPATH": str(folder_of(WATERMARK)), "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def sampled(server: ServerProcess, length: int, seed: int, **arguments: float) -> list[int]:
    sampling = {"temperature": 1, "seed": seed, "ignore_eos": True, "return_token_ids": True}
    answer = server.complete("Once upon", max_tokens=length, **sampling, vllm_xargs=arguments)
    return body_of(answer)["choices"][0]["token_ids"]


def test_watermark_is_found_where_it_was_asked_for(server, plain, tiny_llama):
    asked = [
        {"length": 64, "seed": 1, "gamma": 0.25, "delta": 6.0},
        {"length": 24, "seed": 2, "delta": 0.0},
        {"length": 48, "seed": 3, "gamma": 0.5, "delta": 6.0},
        {"length": 64, "seed": 4, "delta": 0.0},
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda request: sampled(server, **request), asked))
    # Rows move as the shorter ones leave: each request must keep its own arguments.
    assert answers == [sampled(server, **request) for request in asked]
    # No bias, no change.
    assert [answers[1], answers[3]] == [sampled(plain, 24, 2), sampled(plain, 64, 4)]
    passages = [(0.25, answers[0]), (0.25, answers[3]), (0.5, answers[2])]
    marked, unmarked, also_marked = z_scores(tiny_llama, *passages)
    assert min(marked, also_marked) > 4, "what the detector calls certain"
    assert abs(unmarked) < 3


# pping-lang: metrics of its own


def test_metrics_file_and_dashboard_tell_of_requests(server, metrics_folder, dashboard):
    usage = body_of(server.complete(max_tokens=9, ignore_eos=True))["usage"]
    file = metrics_folder / "metrics.jsonl"

    def points() -> list[dict]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def last_request() -> dict[str, float]:
        return {point["n"]: point["v"] for point in points() if point["n"].startswith("vllm.req.")}

    assert wait_until(lambda: last_request().get("vllm.req.gen_tokens") == 9), last_request()
    assert last_request()["vllm.req.prompt_tokens"] == usage["prompt_tokens"]
    assert last_request()["vllm.req.e2e_latency_ms"] > 0
    names = {point["n"] for point in points()}
    assert {"vllm.scheduler.running_reqs", "vllm.scheduler.kv_cache_usage_ratio", "vllm.iter.gen_tokens"} <= names
    with httpx.Client(base_url=dashboard, trust_env=False) as http:
        assert "vllm.req.gen_tokens" in http.get("/api/metrics/snapshot").text
        system = http.get("/api/system").json()
    assert "0.32.0" in json.dumps(system)
    assert any(entry["name"] == "pping_lang" for entry in server.http.get("/plugins").json()["ledger"])
