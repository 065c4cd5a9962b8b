"""Every field of every body: it changes something, or is refused by name, or is documented as without effect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anthropic.types.beta.message_create_params
import anthropic.types.message_count_tokens_params
import anthropic.types.message_create_params
import msgspec
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.embedding_create_params
import openai.types.responses.response_create_params
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from hardpoint.front_end.server import refusals
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest
from hardpoint.front_end.server.protocol.completions import CompletionRequest
from hardpoint.front_end.server.protocol.messages import CountTokensRequest, MessagesRequest
from hardpoint.front_end.server.protocol.pooling import EmbeddingRequest
from hardpoint.front_end.server.protocol.responses import ResponsesRequest
from hardpoint.front_end.server.protocol.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer, TokenizerParts

ROOT = Path(__file__).parents[4]
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}
SCRIPT = '<think>so</think>hello <tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2 + "<|end|>"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

# Field -> a value that is not the default, and what the request needs beside it.
SHARED: dict[str, Any] = {
    "model": ("alias", {}), "frequency_penalty": (0.5, {}), "logit_bias": ({"5": 1}, {}), "n": (2, {}),
    "presence_penalty": (0.5, {}), "seed": (3, {}), "stop": (["hello"], {}), "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}), "temperature": (0.5, {}), "top_p": (0.5, {}),
    "user": ("u", {}), "use_beam_search": (True, {}), "top_k": (3, {}), "min_p": (0.1, {}),
    "repetition_penalty": (1.5, {}), "watermarking": (True, {}), "length_penalty": (2.0, {}),
    "stop_token_ids": ([5], {}), "include_stop_str_in_output": (True, {"stop": ["hello"]}), "ignore_eos": (True, {}),
    "min_tokens": (1, {}), "skip_special_tokens": (False, {}), "spaces_between_special_tokens": (False, {}),
    "truncate_prompt_tokens": (1, {}), "truncation_side": ("right", {"truncate_prompt_tokens": 1}),
    "allowed_token_ids": ([5], {}), "prompt_logprobs": (1, {}), "bad_words": (["x"], {}),
    "response_format": ({"type": "json_object"}, {}), "structured_outputs": ({"regex": "a"}, {}),
    "priority": (1, {}), "request_id": ("other", {}), "session_id": ("s", {}), "return_token_ids": (True, {}),
    "routed_experts_prompt_start": (1, {}), "return_token_offsets": (True, {}), "mm_payload": ("none", {}),
    "return_mm_kwargs": (True, {}), "cache_salt": ("a", {}), "kv_transfer_params": ({"a": 1}, {}),
    "ec_transfer_params": ({"a": 1}, {}), "vllm_xargs": ({"a": 1}, {}),
    "repetition_detection": ({"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}, {}),
    "thinking_token_budget": (5, {}), "stream_interval": (2, {}),
}  # fmt: skip
COMPLETIONS = {
    **SHARED,
    "prompt": ("ho", {}), "echo": (True, {}), "logprobs": (1, {}), "max_tokens": (2, {}), "suffix": ("x", {}),
    "prompt_embeds": ("x", {}), "add_special_tokens": (False, {}), "logprob_token_ids": ([5], {"logprobs": 1}),
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
}  # fmt: skip
_KWARGS = ({"loud": True}, {})
CHAT = {
    **SHARED,
    "messages": ([{"role": "user", "content": "ho"}], {}), "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}), "max_tokens": (2, {}), "max_completion_tokens": (2, {}),
    "tools": ([TOOL], {}), "tool_choice": ("none", {"tools": [TOOL]}), "reasoning_effort": ("low", {}),
    "include_reasoning": (False, {}), "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "echo": (True, {"messages": [{"role": "assistant", "content": "hi"}]}), "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {"messages": [{"role": "assistant", "content": "hi"}]}),
    "add_special_tokens": (True, {}), "documents": ([{"a": "b"}], {}), "chat_template": ("x", {}),
    "chat_template_kwargs": _KWARGS, "media_io_kwargs": ({"image": {}}, {}), "mm_processor_kwargs": ({"a": 1}, {}),
    "return_prompt_text": (True, {}), "logprob_token_ids": ([5], {"logprobs": True}),
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
}  # fmt: skip
RESPONSES = {
    "model": ("alias", {}), "input": ("ho", {}), "instructions": ("brief", {}), "background": (True, {}),
    "include": (["file_search_call.results"], {}), "max_output_tokens": (2, {}), "max_tool_calls": (2, {}),
    "metadata": ({"a": "b"}, {}), "parallel_tool_calls": (False, {"tools": [FLAT]}),
    "previous_response_id": ("resp_x", {}), "prompt": ({"id": "x"}, {}), "reasoning": ({"effort": "low"}, {}),
    "service_tier": ("flex", {}), "store": (True, {}), "stream": (True, {}), "temperature": (0.5, {}),
    "text": ({"format": {"type": "json_object"}}, {}), "tool_choice": ("none", {"tools": [FLAT]}),
    "tools": ([FLAT], {}), "top_logprobs": (2, {}), "top_p": (0.5, {}), "top_k": (3, {}), "truncation": ("auto", {}),
    "user": ("u", {}), "seed": (3, {}), "stop": (["hello"], {}), "priority": (1, {}), "cache_salt": ("a", {}),
    "request_id": ("resp_other", {}), "include_reasoning": (False, {}), "structured_outputs": ({"regex": "a"}, {}),
    "skip_special_tokens": (False, {}), "chat_template_kwargs": _KWARGS, "vllm_xargs": ({"a": 1}, {}),
}  # fmt: skip
COUNT = {
    "model": ("nobody", {}), "messages": ([{"role": "user", "content": "hoo"}], {}), "system": ("brief", {}),
    "tools": ([ANTHROPIC_TOOL], {}), "thinking": ({"type": "disabled"}, {}), "chat_template_kwargs": _KWARGS,
    "tool_choice": ({"type": "none"}, {"tools": [ANTHROPIC_TOOL]}), "output_config": ({"effort": "low"}, {}),
}  # fmt: skip
MESSAGES = {
    **COUNT,
    "model": ("alias", {}), "max_tokens": (2, {}), "metadata": ({"user_id": "u"}, {}),
    "stop_sequences": (["hello"], {}),
    "stream": (True, {}), "temperature": (0.5, {}), "top_p": (0.5, {}), "top_k": (3, {}), "request_id": ("other", {}),
}  # fmt: skip
TOKENIZE = {
    "model": ("nobody", {}), "prompt": ("ho", {}), "add_special_tokens": (False, {}), "return_token_strs": (True, {}),
}  # fmt: skip
TOKENIZE_CHAT = {
    **{name: CHAT[name] for name in (
        "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template",
        "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tools",
    )},
    "model": ("nobody", {}), "return_token_strs": (True, {}),
}  # fmt: skip
DETOKENIZE = {"model": ("nobody", {}), "tokens": ([3], {})}

BODIES = {
    "completions": (CompletionRequest, "/v1/completions", {"prompt": "hi", "max_tokens": 300}, COMPLETIONS),
    "chat": (ChatCompletionRequest, "/v1/chat/completions", {"messages": USER}, CHAT),
    "responses": (ResponsesRequest, "/v1/responses", {"input": "hi"}, RESPONSES),
    "messages": (MessagesRequest, "/v1/messages", {"messages": USER, "max_tokens": 300}, MESSAGES),
    "count": (CountTokensRequest, "/v1/messages/count_tokens", {"messages": USER}, COUNT),
    "tokenize": (TokenizeCompletionRequest, "/tokenize", {"prompt": "hi"}, TOKENIZE),
    "tokenize chat": (TokenizeChatRequest, "/tokenize", {"messages": USER}, TOKENIZE_CHAT),
    "detokenize": (DetokenizeRequest, "/detokenize", {"tokens": [5]}, DETOKENIZE),
}
# What a template does with its arguments, so that fields for it have something to change.
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{{ tools or '' }}"
    "{{ 'loud' if loud }}{{ 'brief' if enable_thinking is defined }}{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tokenizer):
    """One that puts its special token around texts."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    end = tokenizer.eos_token_id
    backend.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    return Tokenizer(
        TokenizerParts(
            backend, "tiny", special={"eos_token": "<|end|>"}, chat_templates={"default": TEMPLATE}, config={}
        )
    )


@pytest.fixture
def make(make_server, monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    (tmp_path / "template").write_text(TEMPLATE)
    config = {"model_config__max_model_len": 4096, "structured_outputs_config__reasoning_parser": "deepseek_r1"}
    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "exclude_tools_when_tool_choice_none": True}
    return lambda: make_server(SCRIPT, config, chat_template=str(tmp_path / "template"), **flags)


async def seen(server: Any, path: str, body: dict[str, Any]) -> Any:
    """All that comes of a request: status, answer, and what the engine was asked."""
    named = {"request_id": "fixed"} if path.startswith("/v1/") and "count" not in path else {}
    before = len(server.engine.requests)
    answer = await server.post(path, {**named, **body})
    text = re.sub(r'[0-9a-f]{32}|chatcmpl-tool-[0-9a-f]+|"created(_at)?":\d+', "#", answer.text)
    asked = [msgspec.structs.replace(one, arrival_time=0.0) for one in server.engine.requests[before:]]
    return answer.status_code, text, [repr(one) for one in asked]


@pytest.mark.parametrize("kind", BODIES)
def test_a_field_has_an_effect_or_is_refused_or_documented(make, run, kind):
    model, path, base, probes = BODIES[kind]
    assert set(probes) == set(model.model_fields), "a value for each field, please"

    async def check():
        server = await make()
        silent = []
        for name, (value, beside) in probes.items():
            context = {**base, **beside}
            without = await seen(server, path, {k: v for k, v in context.items() if k != name or k in base})
            status, text, asked = await seen(server, path, {**context, name: value})
            assert without[0] == 200, (name, without)
            if status != 200:
                assert status in (400, 404), (name, text)
                assert name in text, f"{name} is refused in other words: {text}"
            elif (status, text, asked) == without and name not in model.rules.without_effect:
                silent.append(name)
            elif name in model.rules.without_effect:
                assert (status, text, asked) == without, f"{name} has an effect after all"
        assert not silent, silent

    run(check())


PARAMS = {
    "chat": [openai.types.chat.completion_create_params.CompletionCreateParamsBase],
    "completions": [openai.types.completion_create_params.CompletionCreateParamsBase],
    "responses": [openai.types.responses.response_create_params.ResponseCreateParamsBase],
    "messages": [
        anthropic.types.message_create_params.MessageCreateParamsBase,
        anthropic.types.beta.message_create_params.MessageCreateParamsBase,
    ],
    "count": [anthropic.types.message_count_tokens_params.MessageCountTokensParams],
    "embeddings": [openai.types.embedding_create_params.EmbeddingCreateParams],
}


@pytest.mark.parametrize("kind", PARAMS)
def test_whatever_an_official_client_can_send_is_known(kind):
    model = EmbeddingRequest if kind == "embeddings" else BODIES[kind][0]
    headers = {"betas"}  # the client sends it as a header
    for params in PARAMS[kind]:
        names = params.__required_keys__ | params.__optional_keys__
        assert names - set(model.model_fields) - model.rules.known - headers == set()


def built(path: str, value: Any, inner: dict[str, Any]) -> dict[str, Any]:
    """A body in which `value` stands at `path`. `inner` has what an object at a path needs beside that."""
    names, made = path.split("."), value
    for depth in range(len(names) - 1, -1, -1):
        made = [made] if names[depth] == "*" else {**inner.get(".".join(names[:depth]), {}), names[depth]: made}
    return made


# What must stand beside a field, by the path of the object both are in.
BESIDE: dict[str, dict[str, Any]] = {
    "tools.*": {"name": "f", "input_schema": {}, "function": TOOL["function"]},
    "tools.*.function": TOOL["function"],
    "stream_options": {},
    "thinking": {"type": "adaptive"},
    "messages.*": {"role": "user"},
    "messages.*.content.*": {"type": "text", "text": "hi"},
    "messages.*.content.*.image_url": {"url": "data:,"},
    "input.*": {"role": "user"},
    "input.*.content.*": {"type": "input_text", "text": "hi"},
}
ODD: dict[str, Any] = {"padding": "max_length", "truncation": "auto", "length_penalty": 2.0, "use_beam_search": True,
                       "max_tool_calls": 3, "top_logprobs": 3, "thinking.budget_tokens": 100}  # fmt: skip
OBJECTS = {"mm_processor_kwargs", "media_io_kwargs", "chat_template_kwargs", "prompt"}


@pytest.mark.parametrize("kind", ["completions", "chat", "responses", "messages", "count"])
def test_what_is_refused_is_refused_by_its_path(make, run, kind):
    model, path, base, _ = BODIES[kind]

    async def check():
        server = await make()
        for field, harmless, reason in model.rules.refused:
            odd = ODD.get(field, {"a": {"b": 1}} if field in OBJECTS else True)
            if field == "mm_payload":
                odd = "none"
            if field in ("suffix", "service_tier", "reasoning.summary", "reasoning.generate_summary", "text.verbosity",
                         "include.*"):  # fmt: skip
                odd = "odd"
            assert not harmless(odd)
            more = {"stream": True} if field.startswith("stream_options") else {}
            sort = "custom" if kind in ("messages", "count") else "function"
            inner = {**BESIDE, "tools.*": {**BESIDE["tools.*"], "type": sort}}
            body = {**base, **more, **built(field, odd, inner)}
            answer = await server.post(path, body)
            assert answer.status_code == 400, (field, answer.text)
            error = answer.json()["error"]
            place = field.replace("*", "0")
            assert all(part in error["message"] for part in (reason, place)), (field, error)
            assert "param" not in error or error["param"] == place
        assert server.engine.requests == []

    run(check())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {"store": False, "service_tier": "auto", "metadata": {"a": 1}, "verbosity": "medium", "user": "u",
                  "modalities": ["text"], "prompt_cache_key": "k", "safety_identifier": "s", "function_call": "none"}),
        ("responses", {"store": False, "service_tier": "default", "truncation": "disabled", "prompt_cache_key": "k",
                       "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}, "background": False,
                       "include": ["reasoning.encrypted_content"], "prompt_cache_retention": "in-memory"}),
        ("messages", {"service_tier": "auto", "cache_control": {"type": "ephemeral"}, "metadata": {"user_id": "u"},
                      "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                      "tools": [{**ANTHROPIC_TOOL, "cache_control": {"type": "ephemeral"}, "defer_loading": False}]}),
    ],
)  # fmt: skip
def test_values_that_mean_what_happens_anyway_pass_without_a_word(make, run, caplog, kind, body):
    _, path, base, _ = BODIES[kind]

    async def check():
        answer = await (await make()).post(path, {**base, **body})
        assert answer.status_code == 200, answer.text

    run(check())
    assert "unknown fields" not in caplog.text


def all_rules() -> dict[str, refusals.FieldRules]:
    return {name: value for name, value in vars(refusals).items() if isinstance(value, refusals.FieldRules)}


def test_the_documentation_has_every_field_without_effect():
    page = (ROOT / "docs/reference/http.md").read_text()
    section = page.partition("## Fields without effect")[2].partition("\n## ")[0]
    for rules in all_rules().values():
        for field in rules.without_effect:
            assert f"`{field}`" in section, field


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"a": 1}, "values are texts"),
        (["a"], "valid dictionary"),
        ({str(i): "x" for i in range(17)}, "at most 16 pairs"),
        ({"k" * 65: "x"}, "keys of at most 64 characters"),
        ({"k": "x" * 513}, "values of at most 512"),
    ],
)
def test_metadata_of_responses_has_openais_limits(make, run, metadata, what):
    async def check():
        server = await make()
        answer = await server.post("/v1/responses", {"input": "hi", "metadata": metadata})
        assert answer.status_code == 400
        assert what in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "metadata"
        most = {"k" * 64: "x" * 512, **{str(i): "" for i in range(15)}}
        answer = await server.post("/v1/responses", {"input": "hi", "metadata": most})
        assert answer.json()["metadata"] == most

    run(check())


@pytest.mark.parametrize(
    ("kind", "tools", "param"),
    [
        ("chat", [TOOL, TOOL], "tools.1.function.name"),
        ("responses", [FLAT, FLAT], "tools.1.name"),
        ("messages", [ANTHROPIC_TOOL, {**ANTHROPIC_TOOL, "description": "x"}], "tools.1.name"),
    ],
)
def test_two_tools_of_one_name_are_refused(make, run, kind, tools, param):
    _, path, base, _ = BODIES[kind]

    async def check():
        answer = await (await make()).post(path, {**base, "tools": tools})
        assert answer.status_code == 400
        assert f"{param}: two tools have the name 'f'" in answer.json()["error"]["message"]

    run(check())
