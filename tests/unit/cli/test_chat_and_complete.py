"""`hardpoint chat` and `hardpoint complete` against a small server that answers by script."""

from __future__ import annotations

import http.server
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hardpoint.cli.api_client import ApiClient, ApiClientError
from hardpoint.cli.main import main


class Script:
    """What the server answers and what it was asked."""

    def __init__(self):
        self.pieces = ["Hello", ", ", "wörld"]
        self.status = 200
        self.error = None
        self.pause_s = 0.0
        self.requests: list[tuple[str, str | None, dict]] = []
        self.broken = threading.Event()
        self.url = ""


@pytest.fixture
def script():
    script = Script()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.answer({"data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.requests.append((self.path, self.headers.get("authorization"), body))
            if script.status != 200:
                self.answer({"error": {"message": "not today", "code": script.status}}, script.status)
                return
            self.send_response(200)
            self.end_headers()
            try:
                for piece in script.pieces:
                    self.wfile.write(b": comment\n\n")
                    choice = {"text": piece} if "messages" not in body else {"delta": {"content": piece}}
                    self.event({"choices": [choice]})
                    time.sleep(script.pause_s)
                if script.error:
                    self.event({"error": {"message": script.error}})
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                script.broken.set()

        def event(self, chunk):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()

        def answer(self, body, status=200):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}/v1"
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


def test_quick_chat_prints_the_answer(script, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    words = ["chat", "--url", script.url, "-q", "hi", "--system-prompt", "be kind", "--temperature", "0"]
    assert main(words) == 0
    assert capsys.readouterr().out == "Hello, wörld\n"
    ((path, key, body),) = script.requests
    assert path == "/v1/chat/completions"
    assert key == "Bearer from-env"
    assert body["model"] == "first"
    assert body["stream"] is True
    assert body["temperature"] == 0
    assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", [["-q", "Once"], ["Once"]])
def test_quick_completion_prints_the_rest(script, capsys, text):
    words = ["complete", "--url", script.url.removesuffix("/v1"), *text, "--model-name", "second"]
    assert main([*words, "--api-key", "k", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == "Hello, wörld\n"
    ((path, key, body),) = script.requests
    assert (path, key) == ("/v1/completions", "Bearer k")
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("second", "Once", 5)


def test_conversation_remembers_what_was_answered(script, capsys, monkeypatch):
    lines = iter(["one", "", "two"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", "--url", script.url]) == 0
    roles = [[message["role"] for message in body["messages"]] for _, _, body in script.requests]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert script.requests[1][2]["messages"][1]["content"] == "Hello, wörld"


def test_refusals_are_told(script, capsys):
    script.status = 400
    assert main(["chat", "--url", script.url, "-q", "hi"]) == 1
    assert "not today" in capsys.readouterr().err
    script.status = 401
    assert main(["complete", "--url", script.url, "-q", "hi"]) == 1
    assert "--api-key" in capsys.readouterr().err


def test_refused_line_does_not_end_the_conversation(script, capsys, monkeypatch):
    script.error = "the engine broke"
    lines = iter(["one", "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    assert main(["chat", "--url", script.url]) == 0
    assert capsys.readouterr().err.count("the engine broke") == 2
    # What failed is not part of the conversation.
    assert len(script.requests[1][2]["messages"]) == 1


def test_no_server_is_told(capsys):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    assert main(["chat", "--url", url, "-q", "hi"]) == 1
    told = capsys.readouterr().err
    assert url in told
    assert "hardpoint serve" in told


def test_addresses():
    assert ApiClient("localhost:8000", None)._base == "/v1"
    assert ApiClient("https://x/api/v1/", None)._base == "/api/v1"
    for bad in ("ftp://x", "http://"):
        with pytest.raises(ApiClientError):
            ApiClient(bad, None)


def test_ctrl_c_stops_the_answer_and_the_request(script):
    """At a real terminal: the first Ctrl-C ends the answer, the second at the prompt ends the command."""
    script.pieces = ["piece "] * 100_000  # More than there is time for.
    script.pause_s = 0.05
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "hardpoint", "chat", "--url", script.url]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        ends = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < ends, seen
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 4096)

    try:
        read_until(b"> ")
        os.write(master, b"talk\n")
        read_until(b"piece piece")
        process.send_signal(signal.SIGINT)
        read_until(b" [stopped]\r\n> ")
        assert script.broken.wait(60), "the request went on"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
