"""`hardpoint chat` and `hardpoint complete` against the real server."""

from __future__ import annotations

import pytest

from hardpoint.cli.main import main

pytestmark = pytest.mark.server


def test_chat_prints_what_the_server_answers(server, client, capsys):
    words = [
        "chat",
        "--url",
        server.url,
        "--api-key",
        server.key,
        "-q",
        "hi",
        "--temperature",
        "0",
        "--max-tokens",
        "8",
    ]
    assert main(words) == 0
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    assert capsys.readouterr().out == answer.choices[0].message.content + "\n"


def test_complete_prints_the_rest(server, client, capsys):
    words = ["complete", "--url", f"{server.url}/v1", "--api-key", server.key, "-q", "The", "--temperature", "0"]
    assert main([*words, "--max-tokens", "8", "--model-name", "other"]) == 0
    answer = client.completions.create(model="tiny", prompt="The", temperature=0, max_tokens=8)
    assert capsys.readouterr().out == answer.choices[0].text + "\n"


def test_wrong_key_is_told(server, capsys):
    assert main(["chat", "--url", server.url, "--api-key", "wrong", "-q", "hi"]) == 1
    assert "--api-key" in capsys.readouterr().err
