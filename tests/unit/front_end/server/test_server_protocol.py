"""Every documented field is there, with its documented default."""

from __future__ import annotations

import pytest

from hardpoint.front_end.server.protocol.base import PerRequestMetrics, StreamOptions, UsageInfo
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest, DeltaMessage
from hardpoint.front_end.server.protocol.completions import CompletionRequest
from hardpoint.front_end.server.protocol.sampling import SharedRequest
from hardpoint.front_end.server.protocol.tokenize import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from hardpoint.types.sampling_params import RequestOutputKind

# Name -> default, as vLLM 0.32 documents them; `request_id` is made up for each request.
SHARED = {
    "model": None, "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "seed": None,
    "stop": [], "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None,
    "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "allowed_token_ids": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0,
    "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0,
    "return_token_offsets": False, "mm_payload": "tensors", "return_mm_kwargs": None, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "thinking_token_budget": None, "stream_interval": None,
}  # fmt: skip
COMPLETION = {
    "prompt": "x", "echo": False, "logprobs": None, "max_tokens": 16, "suffix": None, "prompt_embeds": None,
    "add_special_tokens": True,
}  # fmt: skip
CHAT = {
    "logprobs": False, "top_logprobs": 0, "max_tokens": None, "max_completion_tokens": None, "tools": None,
    "tool_choice": "none", "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True,
    "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "documents": None, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
    "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("request_", "own"),
    [
        (CompletionRequest(prompt="x"), COMPLETION),
        (ChatCompletionRequest(messages=MESSAGES), {**CHAT, "messages": MESSAGES}),
    ],
)
def test_fields_and_defaults(request_, own):
    found = request_.model_dump()
    assert len(found.pop("request_id")) == 32
    assert found == {**SHARED, **own}


def test_small_bodies():
    assert TokenizeCompletionRequest(prompt="x").model_dump() == {
        "model": None, "prompt": "x", "add_special_tokens": True, "return_token_strs": False,
    }  # fmt: skip
    assert set(TokenizeChatRequest.model_fields) == {
        "model", "messages", "add_generation_prompt", "continue_final_message", "add_special_tokens",
        "return_token_strs", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "tools",
    }  # fmt: skip
    assert set(TokenizeResponse.model_fields) == {"count", "max_model_len", "tokens", "token_strs"}
    assert set(DetokenizeRequest.model_fields) == {"model", "tokens"}
    assert StreamOptions().model_dump() == {"include_usage": False, "continuous_usage_stats": False}
    assert set(UsageInfo.model_fields) == {
        "prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details",
    }  # fmt: skip
    assert set(PerRequestMetrics.model_fields) == {
        "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second",
        "speculative_decoding",
    }  # fmt: skip
    assert set(DeltaMessage.model_fields) == {"role", "content", "reasoning", "tool_calls"}


def test_every_sampling_field_is_used_or_refused():
    """A field that changes nothing would be a silent loss."""
    from hardpoint.front_end.server import refusals
    from hardpoint.types.sampling_params import SamplingParams

    passed_on = set(SharedRequest.sampling_fields(CompletionRequest(prompt="x"), {}))
    refused = {one.field for one in (*refusals.COMPLETIONS.refused, *refusals.CHAT.refused)}
    # Read by the services themselves, or by nobody on purpose (`user`).
    handled = {
        "model", "user", "stream", "stream_options", "truncate_prompt_tokens", "truncation_side", "prompt_logprobs",
        "priority", "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids", "cache_salt",
        "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "response_format", "repetition_detection",
    }  # fmt: skip
    assert set(SharedRequest.model_fields) == (passed_on - {"output_kind", "extra_args"}) | handled | (
        refused & set(SharedRequest.model_fields)
    )
    assert passed_on <= set(SamplingParams.__struct_fields__)


def test_nested_parameters_become_structs():
    request = CompletionRequest(
        prompt="x", repetition_detection={"max_pattern_size": 4, "min_count": 3}, structured_outputs={"regex": "a+"},
        kv_transfer_params={"a": 1}, vllm_xargs={"b": [1, 2]}, stream=True,
    )  # fmt: skip
    params = request.to_sampling_params(5, {})
    assert (params.repetition_detection.max_pattern_size, params.repetition_detection.min_count) == (4, 3)
    assert params.structured_outputs.regex == "a+"
    assert params.extra_args == {"kv_transfer_params": {"a": 1}, "b": [1, 2]}
    assert params.output_kind is RequestOutputKind.DELTA


@pytest.mark.parametrize("value", [{"a": {"b": 1}}, {"a": [[1]]}, {"a": None}, ["a"]])
def test_extra_arguments_are_flat(value):
    with pytest.raises(ValueError, match="vllm_xargs"):
        CompletionRequest(prompt="x", vllm_xargs=value)


def test_tools_without_a_choice_mean_auto():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatCompletionRequest(messages=MESSAGES, tools=tools).tool_choice == "auto"
    assert ChatCompletionRequest(messages=MESSAGES, tools=tools, tool_choice="none").tool_choice == "none"
    named = {"type": "function", "function": {"name": "f"}}
    assert ChatCompletionRequest(messages=MESSAGES, tools=tools, tool_choice=named).tool_choice.function.name == "f"


def test_null_means_the_default():
    for name in ("n", "stream", "stop", "top_logprobs", "stop_token_ids", "logprobs", "tool_choice"):
        ChatCompletionRequest(messages=MESSAGES, **{name: None}).to_sampling_params(None, {})
