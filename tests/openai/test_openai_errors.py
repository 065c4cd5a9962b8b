"""What the official client raises, requests side by side, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import pytest

import openai

pytestmark = pytest.mark.server

MESSAGES = [{"role": "user", "content": "hi"}]


def test_wrong_key(server):
    with server.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert "Unauthorized" in str(caught.value)


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.param == "model"
    assert caught.value.type == "NotFoundError"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_by_name(client, body, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "stream": stream, **body})
    assert caught.value.param == param
    assert caught.value.status_code == 400


def test_context_filled_exactly(client, server):
    token = server.http.post("/tokenize", json={"prompt": "the"}).json()["tokens"][0]
    body = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    assert client.completions.create(prompt=[token] * 255, **body).usage.completion_tokens == 1
    assert client.completions.create(prompt=[token] * 250, **body).usage.total_tokens == 256
    for length in (256, 257, 1000):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=[token] * length, **body)
        assert caught.value.param == "prompt"


def test_full_queue(server, client):
    before = server.metric("vllm:admission_rejections_total", 'reason="max_num_queued_reqs"')
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="tiny", prompt=["a"] * 41, max_tokens=1, stream=stream)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
    assert server.metric("vllm:admission_rejections_total", 'reason="max_num_queued_reqs"') == before + 2
    assert len(client.completions.create(model="tiny", prompt=["a"] * 40, max_tokens=1).choices) == 40


def test_many_at_once_answer_as_alone(server):
    """Greedy text does not depend on the company."""
    prompts = [f"Number {i} of the" for i in range(16)]
    body = {"model": "tiny", "temperature": 0, "max_tokens": 12}

    async def ask() -> list[str]:
        http = httpx.AsyncClient(trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, http_client=http) as client:
            answers = await asyncio.gather(*(client.completions.create(prompt=p, **body) for p in prompts))
            streams = await asyncio.gather(*(_streamed(client, p, body) for p in prompts))
        assert streams == [answer.choices[0].text for answer in answers]
        return streams

    together = asyncio.run(ask())
    with server.client() as client:
        alone = [client.completions.create(prompt=p, **body).choices[0].text for p in prompts]
    assert together == alone


async def _streamed(client: openai.AsyncOpenAI, prompt: str, body: dict) -> str:
    chunks = await client.completions.create(prompt=prompt, stream=True, **body)
    return "".join([chunk.choices[0].text async for chunk in chunks])


def test_closing_a_stream_ends_the_work(server, client, eventually):
    before = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    body = {"model": "tiny", "prompt": "The", "max_tokens": 240, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, n=16, **body)
    next(iter(stream))
    stream.close()
    eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    aborted = lambda: server.metric("vllm:request_success_total", 'finished_reason="abort"')  # noqa: E731
    # The count is shown with the next step.
    client.completions.create(model="tiny", prompt="x", max_tokens=1)
    eventually(lambda: aborted() == before + 16)


def test_client_that_gives_up_waiting_ends_the_work(server, eventually):
    aborted = lambda: server.metric("vllm:request_success_total", 'finished_reason="abort"')  # noqa: E731
    before = aborted()
    body = json.dumps({"model": "tiny", "prompt": "The", "n": 32, "max_tokens": 240, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        eventually(lambda: server.metric("vllm:num_requests_running") == 32)
    server.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    eventually(lambda: aborted() == before + 32)
    assert server.metric("vllm:num_requests_running") == 0


def test_same_id_twice_at_once(server):
    answers = []

    def ask():
        headers = {"X-Request-Id": "twice"}
        answers.append(server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9}, headers=headers))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 4


def test_metrics_count_what_usage_says(server, client):
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    before = [server.metric(name) for name in names]
    usages = [client.completions.create(model="tiny", prompt="a b c", n=n, max_tokens=5).usage for n in (1, 3)]
    generated = sum(usage.completion_tokens for usage in usages)
    after = [server.metric(name) for name in names]
    assert after[0] - before[0] == generated
    # Each of the n sequences has its prompt processed.
    assert after[1] - before[1] == usages[0].prompt_tokens + 3 * usages[1].prompt_tokens
