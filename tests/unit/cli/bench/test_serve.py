"""`hardpoint bench serve` against a small server that answers by script."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time

import pytest

from hardpoint.cli.main import main


class Script:
    """What the server answers and what it was asked."""

    def __init__(self):
        self.tokens = 4
        self.pause_s = 0.0
        self.refuse = 0
        self.break_off = False
        self.usage = True
        self.requests: list[tuple[str, dict[str, str], dict]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.port = 0


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *args):
        pass

    def do_GET(self):
        body = json.dumps({"data": [{"id": "first", "root": "/nowhere"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with script.lock:
            script.requests.append((self.path, headers, body))
            script.at_once += 1
            script.most_at_once = max(script.most_at_once, script.at_once)
            refused = script.refuse > 0
            script.refuse -= refused
        try:
            self.refuse() if refused else self.stream(body)
        finally:
            with script.lock:
                script.at_once -= 1

    def refuse(self):
        body = json.dumps({"error": {"message": "not now"}}).encode()
        self.send_response(503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, body):
        script = self.script
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in range(script.tokens):
            time.sleep(script.pause_s)
            chat = "messages" in body
            choice = {"delta": {"content": f"{number} "}} if chat else {"text": f"{number} "}
            self.event({"choices": [choice | {"finish_reason": None}]})
            if script.break_off:
                self.close_connection = True
                return
        usage = {"prompt_tokens": 7, "completion_tokens": script.tokens}
        self.event({"choices": [], **({"usage": usage} if script.usage else {})})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, event):
        # Cut in the middle of a line: chunks and lines have nothing to do with each other.
        data = b"data: " + json.dumps(event).encode() + b"\n\n"
        self.chunk(data[:9])
        self.chunk(data[9:])

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def script(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    script = Script()
    handler = type("Own", (Handler,), {"script": script})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    script.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def prompts(tmp_path):
    """A file of three prompts, so that no tokenizer is needed."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {number}"}) + "\n" for number in range(3)))
    return path


@pytest.fixture
def bench(script, prompts, tmp_path):
    """Runs the command; returns its exit status and the JSON it wrote."""

    def run(*words):
        out = tmp_path / "out.json"
        out.unlink(missing_ok=True)
        dataset = ["--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-tokenizer-init"]
        base = ["bench", "serve", "--port", str(script.port), *dataset, "--output-json", str(out)]
        status = main([*base, "--num-prompts", "3", *words])
        return status, json.loads(out.read_text()) if out.exists() else None

    return run


def test_every_request_is_sent_and_counted(bench, script, capsys):
    status, result = bench("--custom-output-len", "9", "--disable-shuffle", "--max-concurrency", "1")
    assert status == 0
    assert [body["prompt"] for _, _, body in script.requests] == ["prompt 0", "prompt 1", "prompt 2"]
    path, _, body = script.requests[0]
    assert path == "/v1/completions"
    assert body["model"] == "first"
    assert body["max_tokens"] == 9
    assert body["stream"] is True
    assert (result["completed"], result["failed"]) == (3, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (21, 12)
    assert result["output_throughput"] == pytest.approx(12 / result["duration"])
    assert f"{'output tokens':<44}{12:>12}" in capsys.readouterr().out


def test_the_times_are_those_of_the_stream(bench, script):
    script.pause_s = 0.03
    _, result = bench("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90", "--save-detailed")
    assert result["median_ttft_ms"] >= 30
    assert 30 <= result["median_itl_ms"] <= result["p90_itl_ms"]
    assert result["mean_tpot_ms"] == pytest.approx(sum(1000 * sum(gaps) / 3 for gaps in result["itls"]) / 3, rel=1e-6)
    assert result["mean_e2el_ms"] >= 120
    assert [len(gaps) for gaps in result["itls"]] == [3, 3, 3]
    assert result["generated_texts"] == ["0 1 2 3 "] * 3


def test_chat_goes_to_the_chat_route(bench, script):
    _, result = bench("--backend", "openai-chat", "--chat-template-kwargs", '{"thinking": false}')
    path, _, body = script.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"][0]["content"].startswith("prompt ")
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert result["completed"] == 3


def test_what_every_request_carries(bench, script, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ["--temperature", "0", "--top-k", "3", "--ignore-eos", "--extra-body", '{"cache_prompt": false}']
    bench(*flags, "--header", "x-test=1", "--served-model-name", "other")
    _, headers, body = script.requests[0]
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-test"] == "1"
    expected = {"temperature": 0.0, "top_k": 3, "ignore_eos": True, "cache_prompt": False, "model": "other"}
    assert {name: body[name] for name in expected} == expected
    assert "top_p" not in body


def test_concurrency_is_limited_and_prompts_repeat(bench, script):
    script.pause_s = 0.01
    _, result = bench("--num-prompts", "8", "--max-concurrency", "2", "--num-warmups", "1")
    assert len(script.requests) == 9
    assert script.most_at_once == 2
    assert result["max_concurrent_requests"] == 2
    assert result["completed"] == 8


def test_a_rate_spreads_requests_over_time(bench):
    _, result = bench("--request-rate", "20", "--num-prompts", "6")
    # Six requests at twenty a second: the last is sent after 0.3 s.
    assert result["duration"] >= 0.29
    assert result["request_rate"] == 20


def test_without_usage_chunks_are_counted(bench, script):
    script.usage = False
    _, result = bench()
    assert result["total_output_tokens"] == 12


def test_failures_are_counted_and_said(bench, script, capsys):
    script.refuse = 1
    status, result = bench("--save-detailed")
    assert status == 0
    assert (result["completed"], result["failed"]) == (2, 1)
    assert "status 503: not now" in capsys.readouterr().err
    script.break_off = True
    status, result = bench()
    assert status == 1
    assert result["failed"] == 3


def test_goals_that_are_not_met(bench, script):
    script.pause_s = 0.01
    _, result = bench("--goodput", "ttft:1", "e2el:60000")
    assert result["request_goodput"] == 0
    _, result = bench("--goodput", "ttft:60000")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


def test_it_waits_for_a_server_that_is_not_ready(bench, script):
    script.refuse = 1
    status, result = bench("--ready-check-timeout-sec", "20")
    assert (status, result["failed"]) == (0, 0)


def test_results_are_appended(bench, script, prompts, tmp_path):
    words = ["bench", "serve", "--port", str(script.port), "--dataset-name", "custom", "--dataset-path", str(prompts)]
    words += ["--skip-tokenizer-init", "--num-prompts", "1", "--result-dir", str(tmp_path), "--result-filename", "all"]
    for label in ("one", "two"):
        assert main([*words, "--append-result", "--label", label, "--metadata", "build=7"]) == 0
    saved = [json.loads(line) for line in (tmp_path / "all").read_text().splitlines()]
    assert [(one["label"], one["build"]) for one in saved] == [("one", "7"), ("two", "7")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--lora-modules", "a"], "does not have --lora-modules"),
        (["--use_beam_search"], "does not have --use-beam-search"),
        (["--num-promts", "3"], "unknown flag --num-promts; did you mean --num-prompts?"),
        (["--percentile-metrics", "ttfb"], "there is no time 'ttfb'"),
        (["--metric-percentiles", "101"], "percentiles are from 0 to 100"),
        (["--goodput", "ttft"], "take numbers"),
        (["--request-rate", "0"], "above 0"),
        (["--max-concurrency", "0"], "cannot be so small"),
        (["--num-prompts", "0"], "asks for nothing"),
        (["--header", "novalue"], "is not KEY=VALUE"),
        (["--base-url", "ftp://x"], "not the address of a server"),
        (["--backend", "tgi"], "invalid choice"),
        (["--chat-template-kwargs", "{}"], "is for --backend openai-chat"),
    ],
)
def test_what_makes_no_sense_is_refused(bench, script, words, says, capsys):
    status, result = bench(*words)
    assert status == 2
    assert result is None
    assert says in capsys.readouterr().err
    assert script.requests == []


def test_no_server(capsys):
    words = ["--dataset-name", "custom", "--model", "m", "--skip-tokenizer-init", "--dataset-path", __file__]
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *words]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_neither_the_help_nor_a_run_imports_torch(script, prompts):
    code = (
        "import sys\nfrom hardpoint.cli.main import main\n"
        f"main(['bench', 'serve', '--port', '{script.port}', '--dataset-name', 'custom', '--dataset-path', "
        f"{str(prompts)!r}, '--num-prompts', '1', '--skip-tokenizer-init'])\n"
        "print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    # No terminal, no bar.
    assert done.stderr == ""
