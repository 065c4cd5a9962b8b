"""/v1/chat/completions and /v1/models through the official client."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.server

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a prompt?"}]
GREEDY = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    card = client.models.retrieve("other")
    assert card.max_model_len == 256


def test_answer(client):
    answer = client.chat.completions.create(**GREEDY)
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert isinstance(message.content, str)
    assert message.tool_calls in (None, [])
    assert answer.usage.completion_tokens <= 20
    assert client.chat.completions.create(**{**GREEDY, "model": "other"}).model == "other"


def test_stream_joins_to_the_answer(client):
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_the_helper_of_the_client_understands_our_stream(client):
    """`.stream()` accumulates chunks with checks of its own; it wants an answer that ends by itself."""
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    with client.chat.completions.stream(**GREEDY, stop=[text[6:9]]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.find(text[6:9])]


def test_n_and_stop(client):
    answer = client.chat.completions.create(**{**GREEDY, "temperature": 1.0, "seed": 3}, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    text = client.chat.completions.create(**GREEDY).choices[0].message.content
    stopped = client.chat.completions.create(**GREEDY, stop=[text[4:7]])
    assert stopped.choices[0].message.content == text[: text.find(text[4:7])]
    assert stopped.choices[0].finish_reason == "stop"


def test_logprobs(client):
    answer = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        values = [candidate.logprob for candidate in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
    joined = b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace")
    assert joined.startswith(answer.choices[0].message.content)


def test_content_parts_and_names(client):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a prompt?"}]
    message = {"role": "user", "content": parts, "name": "someone"}
    extra = {"return_prompt_text": True}
    answer = client.chat.completions.create(**{**GREEDY, "messages": [message]}, extra_body=extra)
    assert "<|im_start|>user\nWhat is\na prompt?<|im_end|>" in answer.prompt_text


def test_usage_details_and_metrics(client):
    text = "Tell me about caches, " * 4
    body = {**GREEDY, "messages": [{"role": "user", "content": text}]}
    first = client.chat.completions.create(**body)
    second = client.chat.completions.create(**body)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens > 32
    assert second.usage.prompt_tokens_details.cached_tokens >= 16
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.metrics["time_to_first_token_ms"] > 0


def test_request_id_comes_back(client):
    raw = client.chat.completions.with_raw_response.create(**GREEDY, extra_headers={"X-Request-Id": "abc-1"})
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.parse().id == "chatcmpl-abc-1"


def test_conversation_goes_on(client):
    first = client.chat.completions.create(**GREEDY).choices[0].message
    messages = [*MESSAGES, first.model_dump(exclude_none=True), {"role": "user", "content": "And a token?"}]
    again = client.chat.completions.create(**{**GREEDY, "messages": messages})
    assert again.usage.prompt_tokens > 30
