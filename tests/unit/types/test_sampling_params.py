"""SamplingParams: names, defaults, ranges, and what follows from one another."""

from __future__ import annotations

import math

import msgspec
import pytest

from hardpoint.errors import VLLMValidationError
from hardpoint.types.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)


def test_defaults_are_those_of_the_documented_fields():
    params = SamplingParams()
    expected = {
        "n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 16, "min_tokens": 0, "seed": None,
        "logprobs": None, "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "ignore_eos": False,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in expected} == expected


def test_positional_arguments_come_in_the_documented_order():
    params = SamplingParams(2, 0.5, 0.25, 1.5, 0.75)
    assert (params.n, params.presence_penalty, params.frequency_penalty) == (2, 0.5, 0.25)
    assert (params.repetition_penalty, params.temperature) == (1.5, 0.75)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 1.5), ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", math.inf), ("temperature", -0.1), ("temperature", math.nan),
        ("temperature", math.inf), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
        ("min_p", -0.1), ("min_p", 1.1), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("min_tokens", -1),
        ("logprobs", -2), ("prompt_logprobs", -2), ("stream_interval", 0), ("seed", 2**63), ("seed", -(2**63) - 1),
        ("stop", [""]), ("stop", ["x", ""]), ("stop", [5]), ("stop_token_ids", ["x"]), ("bad_words", [""]),
        ("allowed_token_ids", []), ("logit_bias", {1: math.nan}), ("logit_bias", {"x": 1.0}),
        ("thinking_token_budget", -2),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(VLLMValidationError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert isinstance(caught.value, ValueError)


def test_the_number_of_outputs_has_a_ceiling(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    assert SamplingParams(n=3).n == 3
    with pytest.raises(VLLMValidationError, match="at most 3"):
        SamplingParams(n=4)


def test_min_tokens_may_not_exceed_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=100, max_tokens=None).min_tokens == 100
    with pytest.raises(VLLMValidationError, match="min_tokens"):
        SamplingParams(min_tokens=17)


def test_stop_strings_need_text():
    with pytest.raises(VLLMValidationError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_forms_that_mean_the_same():
    params = SamplingParams(stop="end", seed=-1, thinking_token_budget=-1, logprobs=True, prompt_logprobs=True)
    assert (params.stop, params.seed, params.thinking_token_budget) == (["end"], None, None)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == []


def test_greedy_forgets_the_filters():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.1)
    assert (params.sampling_type, params.top_p, params.top_k, params.min_p) == (SamplingType.GREEDY, 1.0, 0, 0.0)
    assert SamplingParams(seed=5).sampling_type is SamplingType.RANDOM_SEED
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(temperature=1e-4).temperature == 0.01


def test_text_to_hold_back_follows_from_the_stop_strings():
    assert SamplingParams(stop=["ab", "abcd"]).output_text_buffer_length == 3
    assert SamplingParams(stop=["abcd"], include_stop_str_in_output=True).output_text_buffer_length == 0


def test_prompt_logprobs_bypass_the_prefix_cache():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False


def test_from_optional_takes_none_for_the_default():
    params = SamplingParams.from_optional(temperature=None, top_p=None, n=None, stop=None, max_tokens=None)
    assert (params.temperature, params.top_p, params.n, params.stop) == (1.0, 1.0, 1, [])
    assert params.max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16


def test_from_optional_reads_openais_logit_bias():
    assert SamplingParams.from_optional(logit_bias={"5": 250, 6: -250}).logit_bias == {5: 100.0, 6: -100.0}
    for wrong in ({"five": 1}, {"5": math.nan}, {"5": math.inf}, {"5": -math.inf}):
        with pytest.raises(VLLMValidationError, match="logit_bias"):
            SamplingParams.from_optional(logit_bias=wrong)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_parameters_survive_the_wire():
    params = SamplingParams(
        temperature=0.5, stop=["a"], logit_bias={3: 1.5}, extra_args={"x": [1]}, bad_words=["w"], min_tokens=2,
        output_kind=RequestOutputKind.DELTA, structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
    )  # fmt: skip
    params.update_from_generation_config({"eos_token_id": [2, 3]}, 2)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert (decoded.eos_token_id, decoded.all_stop_token_ids) == (2, {2, 3})


def test_a_clone_is_independent_unless_told_otherwise():
    params = SamplingParams(stop=["a"])
    params.clone().stop.append("b")
    assert params.stop == ["a"]
    shared = SamplingParams(skip_clone=True)
    assert shared.clone() is shared


def test_num_logprobs_counts_asked_ids():
    assert SamplingParams(logprob_token_ids=[1, 2, 3]).num_logprobs == 3
    assert SamplingParams(logprobs=2).num_logprobs == 2


def test_warm_up_parameters_are_valid():
    assert SamplingParams.for_sampler_warmup().temperature > 0


@pytest.mark.parametrize(
    "given",
    [
        {}, {"json": "{}", "regex": "a"}, {"json": ""}, {"json_object": False}, {"choice": []}, {"grammar": ""},
        {"regex": ""}, {"structural_tag": ""},
    ],
)  # fmt: skip
def test_a_constraint_is_exactly_one_and_says_something(given):
    with pytest.raises(VLLMValidationError, match="structured_outputs"):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("given", [(2, 3, 2), (3, 1, 1), (-1, 0, 0), (3, 1, 0)])
def test_repetition_detection_must_be_able_to_find_something(given):
    with pytest.raises(VLLMValidationError, match="repetition_detection"):
        RepetitionDetectionParams(*given)


def test_repetition_detection_is_off_by_default():
    assert RepetitionDetectionParams().max_pattern_size == 0
