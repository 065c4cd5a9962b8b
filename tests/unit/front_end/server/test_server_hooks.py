"""Request hooks: what they see, change and refuse, whole and streamed, and what becomes of one that fails."""

from __future__ import annotations

import json

import pytest

from hardpoint.contracts.request_hook import RequestHook, RequestRefused, TextFilter
from hardpoint.front_end.server.hooks import RequestHooks

EOS = "<|end|>"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "hi", "max_tokens": 40}}


class Hide(TextFilter):
    """Replaces `secret`, and keeps back what may become it."""

    def __init__(self, word: str = "secret", by: str = "***") -> None:
        self.word, self.by, self.kept = word, by, ""

    def feed(self, text: str) -> str:
        text = (self.kept + text).replace(self.word, self.by)
        held = max((n for n in range(1, len(self.word)) if text.endswith(self.word[:n])), default=0)
        self.kept = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        return self.kept


class Hiding(RequestHook):
    def text_filter(self, request, choice, channel):
        return Hide()


@pytest.fixture
def make(make_server):
    """A server with these hooks."""

    async def build(*kinds, **options):
        server = await make_server(**options)
        context = server.app.state.context
        context.hooks = RequestHooks([kind(server.engine.vllm_config) for kind in kinds])
        return server

    return build


def text_of(path: str, answer: dict) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


def streamed_text(path: str, chunks: list[dict]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"].get("content") or "" if path == CHAT else choice["text"] for choice in choices]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_texts_pass_the_filters_whole_and_streamed(make, run, path):
    async def check():
        server = await make(Hiding, script="a secret is no secre" + EOS)
        answer = await server.post(path, BODIES[path])
        assert text_of(path, answer.json()) == "a *** is no secre"
        pieces = streamed_text(path, await server.events(path, **BODIES[path]))
        assert "".join(pieces) == "a *** is no secre"

    run(check())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_is_not_held_back(make, run, path):
    """Each letter is sent when it is there, but for those that may be hidden."""

    async def check():
        server = await make(Hiding, script="abcdef" + EOS)
        server.engine.pace_s = 0.01
        pieces = [piece for piece in streamed_text(path, await server.events(path, **BODIES[path])) if piece]
        assert pieces == list("abcdef")

    run(check())


def test_hooks_work_one_after_the_other(make, run):
    class Second(RequestHook):
        def text_filter(self, request, choice, channel):
            return Hide("***", "+")

    async def check():
        server = await make(Hiding, Second, script="a secret" + EOS)
        assert text_of(CHAT, await server.chat()) == "a +"
        assert "".join(streamed_text(CHAT, await server.events(CHAT, messages=USER))) == "a +"

    run(check())


def test_each_choice_has_a_filter_of_its_own(make, ids, run):
    async def check():
        server = await make(Hiding, script=lambda prompt, index: ids(["sec", "ret"][index] + EOS))
        answer = await server.chat(n=2)
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["sec", "ret"]

    run(check())


def test_a_request_is_seen_before_anything_else_and_may_be_changed(make, run):
    seen = []

    class Changes(RequestHook):
        async def before_admission(self, request):
            seen.append((request.path, request.headers["x-team"], request.body["max_tokens"]))
            request.body["max_tokens"] = 2
            request.body["messages"].insert(0, {"role": "system", "content": "be brief"})

    async def check():
        server = await make(Changes, script="abcdef" + EOS)
        body = {"messages": USER, "max_tokens": 5, "return_prompt_text": True}
        answer = (await server.post(CHAT, body, headers={"x-team": "red"})).json()
        assert text_of(CHAT, answer) == "ab"
        assert answer["prompt_text"].startswith("<|system|>be brief")
        assert seen == [(CHAT, "red", 5)]

    run(check())


def test_what_a_hook_writes_is_checked_like_what_a_client_sends(make, run):
    class Wrong(RequestHook):
        async def before_admission(self, request):
            request.body["n"] = "many"

    async def check():
        server = await make(Wrong)
        answer = await server.post(CHAT, {"messages": USER})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "n"

    run(check())


def test_a_refused_request_never_reaches_the_engine(make, run):
    class Refuses(RequestHook):
        async def before_admission(self, request):
            raise RequestRefused("not today", status=403, kind="PermissionDenied")

    async def check():
        server = await make(Refuses)
        for stream in (False, True):
            answer = await server.post(CHAT, {"messages": USER, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDenied")
            assert answer.json()["error"]["message"] == "not today"
        assert server.engine.requests == []

    run(check())


class StopsAtX(TextFilter):
    def feed(self, text: str) -> str:
        if "x" in text:
            raise RequestRefused("no more", status=451)
        return text

    def finish(self) -> str:
        return ""


def test_a_refusal_in_the_middle_ends_the_answer(make, run):
    class Stops(RequestHook):
        def text_filter(self, request, choice, channel):
            return StopsAtX()

    async def check():
        server = await make(Stops, script="abxcd" + EOS)
        server.engine.pace_s = 0.01
        answer = await server.post(CHAT, {"messages": USER})
        assert (answer.status_code, answer.json()["error"]["message"]) == (451, "no more")
        *chunks, error = await server.events(CHAT, messages=USER)
        assert "".join(streamed_text(CHAT, chunks)) == "ab"
        assert error["error"]["message"] == "no more"

    run(check())


def test_a_hook_that_fails_lets_nothing_through_and_hurts_no_other_request(make, run):
    class Fails(RequestHook):
        async def before_admission(self, request):
            if request.body.get("user") == "bad":
                raise KeyError("lost")

    async def check():
        server = await make(Fails)
        answer = await server.post(CHAT, {"messages": USER, "user": "bad"})
        assert answer.status_code == 500
        assert "the request hook" in answer.json()["error"]["message"]
        assert "Fails failed: KeyError" in answer.json()["error"]["message"]
        assert server.engine.requests == []
        assert text_of(CHAT, await server.chat()) == "hello world"

    run(check())


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 2}),
                                             (COMPLETIONS, {"return_token_ids": True})])  # fmt: skip
def test_tokens_would_tell_what_a_filter_hides(make, run, path, asked):
    class Looks(Hiding):
        changes_text = False

    async def check():
        hiding, looking = await make(Hiding), await make(Looks)
        answer = await hiding.post(path, {**BODIES[path], **asked})
        assert answer.status_code == 400
        assert "the request hook Hiding may change the text" in json.dumps(answer.json())
        assert (await looking.post(path, {**BODIES[path], **asked})).status_code == 200

    run(check())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("method", ["feed", "finish"])
@pytest.mark.parametrize("kind", [None, 5, SystemExit], ids=str)
def test_a_filter_that_returns_no_text_loses_none_unseen(make, run, path, stream, method, kind):
    def odd(self, *args):
        if kind is SystemExit:
            raise SystemExit(3)
        return kind

    class Odd(RequestHook):
        def text_filter(self, request, choice, channel):
            return type("OddFilter", (Hide,), {method: odd})()

    async def check():
        server = await make(Odd)
        answer = await server.post(path, {**BODIES[path], "stream": stream})
        assert answer.status_code in (500, 200 if stream else 500)
        reason = "SystemExit: 3" if kind is SystemExit else f"its filter returned {type(kind).__name__}, not a text"
        assert f"Odd failed: {'' if kind is SystemExit else 'TypeError: '}{reason}" in answer.text

    run(check())
