"""/v1/completions through the official client."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.server

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24}
PROMPT = "The quick brown"


def test_answer(client):
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint
    (choice,) = answer.choices
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_joins_to_the_answer(client):
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_prompts_as_texts_and_as_ids(client, server):
    texts = ["The quick", "A server answers requests;"]
    ids = [server.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    by_text = client.completions.create(prompt=texts, **GREEDY)
    by_ids = client.completions.create(prompt=ids, **GREEDY)
    alone = [client.completions.create(prompt=text, **GREEDY).choices[0].text for text in texts]
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == alone
    assert [c.index for c in by_text.choices] == [0, 1]


def test_n_outputs_of_one_prompt(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, n=3, seed=5, temperature=1.0, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens > 12


def test_seed_repeats_alone_and_in_company(client):
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 1.0, "max_tokens": 12, "seed": 77}
    first = client.completions.create(**body).choices[0].text
    assert client.completions.create(**body).choices[0].text == first
    assert client.completions.create(**{**body, "seed": 78}).choices[0].text != first


def test_logprobs(client):
    answer = client.completions.create(prompt=PROMPT, logprobs=3, **{**GREEDY, "max_tokens": 6})
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert text[offset:].startswith(token)
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        # Greedy: the chosen one is the best.
        assert value == pytest.approx(max(top.values()))
        assert 1 <= len(top) <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(client, stream):
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, **GREEDY, "max_tokens": 8}
    if stream:
        chunks = [c.choices[0] for c in client.completions.create(stream=True, **body)]
        text = "".join(choice.text for choice in chunks)
        lists = [choice.logprobs for choice in chunks if choice.logprobs]
        tokens = [token for one in lists for token in one.tokens]
        offsets = [offset for one in lists for offset in one.text_offset]
        values = [value for one in lists for value in one.token_logprobs]
    else:
        choice = client.completions.create(**body).choices[0]
        text, tokens, offsets = choice.text, choice.logprobs.tokens, choice.logprobs.text_offset
        values = choice.logprobs.token_logprobs
    assert text.startswith(PROMPT)
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert all(text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_only(client, stream):
    body = {"model": "tiny", "prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *chunks, last = list(client.completions.create(stream=True, **body))
        text, usage = "".join(c.choices[0].text for c in chunks), last.usage
        logprobs = chunks[0].choices[0].logprobs
    else:
        answer = client.completions.create(**body)
        text, usage, logprobs = answer.choices[0].text, answer.usage, answer.choices[0].logprobs
    assert text == "Your answer: Yes"
    assert usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_prompt_logprobs_are_those_of_the_model_itself(client):
    """Scoring what the model wrote: the same log-probabilities as when it wrote it."""
    extra = {"return_token_ids": True}
    written = client.completions.create(prompt=PROMPT, logprobs=0, extra_body=extra, **GREEDY).choices[0]
    ids = written.prompt_token_ids + written.token_ids
    scored = client.completions.create(model="tiny", prompt=ids, echo=True, max_tokens=0, logprobs=0).choices[0]
    values = scored.logprobs.token_logprobs[len(written.prompt_token_ids) :]
    assert values == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)


def test_default_limit_is_sixteen(client):
    for more in ({}, {"max_tokens": None}):
        answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True}, **more)
        assert answer.usage.completion_tokens == 16


def test_sampling_extras(client, server):
    token = server.http.post("/tokenize", json={"prompt": "model"}).json()["tokens"][-1]
    only = client.completions.create(prompt=PROMPT, extra_body={"allowed_token_ids": [token]}, **GREEDY)
    again = client.completions.create(
        prompt=PROMPT, logit_bias={str(token): 100}, extra_body={"return_token_ids": True}, **GREEDY
    )
    assert only.choices[0].text == again.choices[0].text
    assert set(again.choices[0].token_ids) == {token}
    longer = client.completions.create(
        prompt=PROMPT, extra_body={"min_tokens": 20, "ignore_eos": True}, **{**GREEDY, "max_tokens": 20}
    )
    assert longer.usage.completion_tokens == 20


# -- stop strings (B31) -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def greedy_text(server):
    with server.client() as client:
        body = {**GREEDY, "max_tokens": 64}
        return client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **body).choices[0].text


def stops_of(text: str) -> dict[str, list[str]]:
    return {
        "several tokens": [text[10:19]],
        "one character": [text[7]],
        "never completes": [text[:9] + "\u2603"],
        "overlapping": [text[12:18], text[15:24]],
        "the last characters": [text[-3:]],
        "beyond ASCII": [next((c for c in text if ord(c) > 127), "\u2603")],
    }


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What a stop list leaves of a text: the first match to complete wins."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, begin, stop = min(found)
    return text[: end if include else begin], stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", list(stops_of("x" * 40)))
def test_stop_strings(client, greedy_text, name, include):
    stops = stops_of(greedy_text)[name]
    expected, matched = cut(greedy_text, stops, include)
    extra = {"include_stop_str_in_output": include, "ignore_eos": True}
    body = {"prompt": PROMPT, "stop": stops, "extra_body": extra, **GREEDY, "max_tokens": 64}
    choice = client.completions.create(**body).choices[0]
    assert choice.text == expected
    assert choice.finish_reason == ("length" if matched is None else "stop")
    assert choice.stop_reason == matched
    chunks = [c.choices[0] for c in client.completions.create(stream=True, **body)]
    assert "".join(c.text for c in chunks) == expected
    assert all(c.text for c in chunks[:-1]), "an empty chunk"
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (choice.finish_reason, matched)


def test_stop_token_ids(client, server, greedy_text):
    ids = server.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    extra = {"return_token_ids": True, "ignore_eos": True}
    made = client.completions.create(prompt=ids, extra_body=extra, **GREEDY).choices[0].token_ids
    stop = made[5]
    choice = client.completions.create(prompt=ids, extra_body={**extra, "stop_token_ids": [stop]}, **GREEDY).choices[0]
    assert choice.token_ids == made[: made.index(stop) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
