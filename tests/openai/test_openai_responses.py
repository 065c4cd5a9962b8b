"""The Responses API through the official client, on a real server."""

from __future__ import annotations

import json

import pytest

import openai


@pytest.fixture(scope="module")
def keeping(start_server):
    server = start_server("--served-model-name", "tiny", env={"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
    with server.client() as client:
        yield client


ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


def test_whole_streamed_and_continued(keeping):
    form = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
    common = {"model": "tiny", "temperature": 0, "text": form, "max_output_tokens": 200}
    first = keeping.responses.create(input="Hi", instructions="Be brief.", **common)
    assert first.status == "completed"
    assert set(json.loads(first.output_text)) == {"sure"}
    with keeping.responses.stream(input="Hi", instructions="Be brief.", **common) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == first.output_text
    assert keeping.responses.retrieve(first.id).output_text == text
    second = keeping.responses.create(input="And?", previous_response_id=first.id, **common)
    assert second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        keeping.responses.retrieve("resp_none")


def test_in_the_background(keeping):
    begun = keeping.responses.create(model="tiny", input="Hi", background=True, max_output_tokens=900)
    assert begun.status == "queued"
    assert keeping.responses.cancel(begun.id).status == "cancelled"
    assert keeping.responses.retrieve(begun.id).status == "cancelled"
