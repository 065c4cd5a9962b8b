"""Requests are checked against the model, tokenised and turned into engine messages."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import msgspec
import pytest

from hardpoint import platforms
from hardpoint.config.hf_config import HFConfig
from hardpoint.config.sections import LoRAConfig, ModelConfig, StructuredOutputsConfig
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.inputs import InputProcessor
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

CONTEXT = 32
VOCABULARY = 49152


def config(
    *, policy: str = "fcfs", stream_interval: int = 1, generation: dict | None = None, **model
) -> SimpleNamespace:
    model_config = ModelConfig(model="test", **{"max_model_len": CONTEXT, **model})
    model_config.hf_config = model_config.hf_text_config = HFConfig({"vocab_size": VOCABULARY, "eos_token_id": 2})
    model_config.generation_defaults = generation or {}
    return SimpleNamespace(
        model_config=model_config,
        scheduler_config=SimpleNamespace(policy=policy, stream_interval=stream_interval),
        parallel_config=SimpleNamespace(data_parallel_size=2),
        speculative_config=None,
        lora_config=None,
        structured_outputs_config=StructuredOutputsConfig(),
        kv_transfer_config=None,
        ec_transfer_config=None,
    )


@pytest.fixture
def processor(smollm2) -> InputProcessor:
    return InputProcessor(config(), smollm2, [])


def process(processor, prompt="Hello world", params=None, **options) -> EngineCoreRequest:
    return processor.process_inputs("mine", prompt, params or SamplingParams(), **options)[1]


def refused(processor, parameter: str, *, match: str | None = None, **options) -> None:
    with pytest.raises(VLLMValidationError, match=match) as caught:
        process(processor, **options)
    assert caught.value.parameter == parameter


# -- prompts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Hello world", "Hello world"),
        ([19556, 905], None),
        ((19556, 905), None),
        ({"prompt": "Hello world"}, "Hello world"),
        ({"prompt_token_ids": [19556, 905]}, None),
        ({"type": "token", "prompt_token_ids": [19556, 905], "prompt": "said"}, "said"),
        ({"prompt": "Hello world", "multi_modal_data": None, "mm_processor_kwargs": {}}, "Hello world"),
    ],
    ids=str,
)
def test_every_kind_of_prompt_becomes_ids(processor, prompt, text):
    said, request = processor.process_inputs("mine", prompt, SamplingParams())
    assert (said, request.prompt_token_ids) == (text, [19556, 905])


def test_the_message_holds_what_was_asked(processor):
    request = process(
        processor,
        {"prompt": "Hello", "cache_salt": "mine"},
        arrival_time=12.5,
        trace_headers={"traceparent": "x"},
        data_parallel_rank=1,
        session_id="s",
    )
    assert (request.cache_salt, request.arrival_time, request.data_parallel_rank) == ("mine", 12.5, 1)
    assert (request.trace_headers, request.session_id) == ({"traceparent": "x"}, "s")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request


def test_callers_may_use_an_id_twice(processor, monkeypatch):
    first, second = process(processor), process(processor)
    assert first.external_req_id == second.external_req_id == "mine"
    assert first.request_id != second.request_id
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert process(processor).request_id == "mine"


@pytest.mark.parametrize(
    ("prompt", "parameter"),
    [
        (5, "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        (["Hello"], "prompt_token_ids"),
        ([1.5], "prompt_token_ids"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
        ({"prompt": "x", "multi_modal_data": {"image": object()}}, "multi_modal_data"),
        ({"encoder_prompt": "x", "decoder_prompt": None}, "encoder_prompt"),
        ({"prompt": "x", "promt": "typo"}, "promt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ("bad \ud800", "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([VOCABULARY], "prompt"),
        ([-1], "prompt"),
    ],
    ids=lambda value: re.sub(" object at 0x[0-9a-f]+", "", str(value)),
)
def test_prompts_that_cannot_be_run_are_refused(processor, prompt, parameter):
    refused(processor, parameter, prompt=prompt)


def test_a_prompt_must_leave_room_for_an_answer(processor):
    assert len(process(processor, [5] * (CONTEXT - 1)).prompt_token_ids) == CONTEXT - 1
    refused(processor, "prompt", prompt=[5] * CONTEXT, match="no room")
    refused(processor, "prompt", prompt=[5] * (CONTEXT + 1), match=f"{CONTEXT + 1} tokens is too long")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(processor, monkeypatch):
    monkeypatch.setattr(type(processor.tokenizer), "encode", lambda *_, **__: pytest.fail("tokenised"))
    longest = processor.tokenizer.max_chars_per_token
    refused(processor, "prompt", prompt="x" * (CONTEXT * longest + 1), match="characters")


@pytest.mark.parametrize(
    ("kwargs", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 20}, list(range(10))),
        ({"truncate_prompt_tokens": None}, list(range(10))),
    ],
)
def test_truncation_keeps_one_end(processor, kwargs, kept):
    request = process(processor, list(range(10)), tokenization_kwargs=kwargs)
    assert request.prompt_token_ids == kept


def test_truncation_to_the_context_leaves_room_for_the_answer(processor):
    kwargs = {"truncate_prompt_tokens": -1}
    for asked, kept in ((None, CONTEXT - 1), (10, CONTEXT - 10), (10**6, 1)):
        params = SamplingParams(max_tokens=asked)
        assert len(process(processor, [5] * 100, params, tokenization_kwargs=kwargs).prompt_token_ids) == kept


def test_a_cut_text_is_no_longer_the_prompts_text(processor):
    text, request = processor.process_inputs(
        "r", "one two three", SamplingParams(), tokenization_kwargs={"truncate_prompt_tokens": 1}
    )
    assert text is None
    assert len(request.prompt_token_ids) == 1


@pytest.mark.parametrize(
    ("kwargs", "parameter"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "truncation_side"),
        ({"padding": True}, "tokenization_kwargs"),
    ],
)
def test_tokenization_that_is_not_known_is_refused(processor, kwargs, parameter):
    refused(processor, parameter, tokenization_kwargs=kwargs)


def test_special_tokens_may_be_left_out(sentencepiece):
    processor = InputProcessor(config(), sentencepiece, [])
    with_bos = process(processor, "Hello").prompt_token_ids
    assert (
        process(processor, "Hello", tokenization_kwargs={"add_special_tokens": False}).prompt_token_ids == with_bos[1:]
    )


# -- parameters --------------------------------------------------------------------------------------


def test_no_limit_means_the_rest_of_the_context(processor):
    params = SamplingParams(max_tokens=None)
    assert process(processor, [5] * 10, params).sampling_params.max_tokens == CONTEXT - 10
    assert params.max_tokens is None  # the caller's object is left alone
    assert process(processor, [5] * 10, SamplingParams(max_tokens=10**6)).sampling_params.max_tokens == 10**6


def test_end_tokens_come_from_tokenizer_and_generation_config(smollm2):
    processor = InputProcessor(config(generation={"eos_token_id": [2, 7]}), smollm2, [])
    settled = process(processor, params=SamplingParams(stop_token_ids=[9])).sampling_params
    assert settled.eos_token_id == 2
    assert sorted(settled.stop_token_ids) == [7, 9]
    assert settled.all_stop_token_ids == {2, 7, 9}
    deaf = process(processor, params=SamplingParams(stop_token_ids=[9], ignore_eos=True)).sampling_params
    assert (deaf.eos_token_id, deaf.stop_token_ids) == (None, [9])
    # min_tokens still has to keep every one of them away.
    assert deaf.all_stop_token_ids == {2, 7, 9}


def test_end_tokens_a_gguf_file_names_end_answers_too(smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "end_token_ids", frozenset({2, 11}))
    settled = process(InputProcessor(config(), smollm2, [])).sampling_params
    assert (settled.eos_token_id, settled.stop_token_ids) == (2, [11])


def test_bad_words_become_ids(processor):
    settled = process(processor, params=SamplingParams(bad_words=["world"])).sampling_params
    tokenizer = processor.tokenizer
    assert tokenizer.encode("world") in settled.bad_words_token_ids
    assert tokenizer.encode(" world") in settled.bad_words_token_ids


def test_bad_words_are_limited(processor, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_NUM_BAD_WORDS", "2")
    refused(processor, "bad_words", params=SamplingParams(bad_words=["a", "b", "c"]))
    monkeypatch.setenv("VLLM_MAX_NUM_BAD_WORDS", "3")
    monkeypatch.setenv("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", "2")
    refused(processor, "bad_words", params=SamplingParams(bad_words=["a", "b", "c"]))


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids"),
        ({"logprob_token_ids": [VOCABULARY]}, "logprob_token_ids"),
        ({"structured_outputs": StructuredOutputsParams(regex="(a+)+")}, "structured_outputs"),
        ({"structured_outputs": StructuredOutputsParams(json={"enum": list(range(10_001))})}, "structured_outputs"),
        ({"watermarking": True}, "watermarking"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"prompt_logprob_token_ids": [1]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start"),
        ({"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        ({"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
        ({"extra_args": {"kv_transfer_params": {"a": 1}}}, "kv_transfer_params"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_model_cannot_give_is_refused_by_name(processor, params, parameter):
    refused(processor, parameter, params=SamplingParams(**params))


def test_what_asks_for_nothing_is_accepted(processor):
    params = SamplingParams(
        watermarking=False,
        thinking_token_budget=-1,
        logprobs=20,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=2),
        extra_args={"anything": 1},
    )
    assert process(processor, params=params).sampling_params.logprobs == 20


def test_the_whole_vocabulary_may_be_scored_where_allowed(smollm2):
    processor = InputProcessor(config(max_logprobs=-1), smollm2, [])
    assert process(processor, params=SamplingParams(logprobs=-1)).sampling_params.logprobs == -1
    refused(processor, "logprobs", params=SamplingParams(logprobs=VOCABULARY + 1))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (BeamSearchParams(beam_width=2, max_tokens=5), "not supported"),
        (PoolingParams(task="embed"), "generates text and does not pool"),
        (None, "not supported"),
        ({}, "not supported"),
    ],
)
def test_other_kinds_of_parameters_are_refused(processor, params, words):
    with pytest.raises(VLLMValidationError, match=words):
        processor.process_inputs("r", "Hello", params)


def test_requests_for_what_this_version_lacks_are_refused(processor):
    refused(processor, "lora_request", match="--enable-lora", lora_request=LoRARequest("a", 1, "/a"))
    refused(processor, "kv_hints", kv_hints={})


def test_priority_needs_the_policy(processor, smollm2):
    refused(processor, "priority", priority=1)
    assert process(InputProcessor(config(policy="priority"), smollm2, []), priority=-3).priority == -3


def test_a_rank_must_exist(processor):
    refused(processor, "data_parallel_rank", data_parallel_rank=2)


def test_a_request_may_not_stream_finer_than_the_server(smollm2):
    processor = InputProcessor(config(stream_interval=4), smollm2, [])
    refused(processor, "stream_interval", params=SamplingParams(stream_interval=3))
    assert process(processor, params=SamplingParams(stream_interval=4)).sampling_params.stream_interval == 4


# -- plugins -----------------------------------------------------------------------------------------


class Picky:
    """A logits processor that wants one argument."""

    @classmethod
    def validate_params(cls, params):
        if "target" not in (params.extra_args or {}):
            raise ValueError("target is missing")


def test_logits_processors_may_refuse(smollm2):
    processor = InputProcessor(config(), smollm2, [Picky])
    with pytest.raises(VLLMValidationError, match=r"Picky.*target is missing"):
        process(processor)
    assert process(processor, params=SamplingParams(extra_args={"target": 1}))


def test_the_platform_may_refuse(processor, monkeypatch):
    seen = []

    class Strict:
        @staticmethod
        def validate_request(prompt, params):
            seen.append((prompt["prompt_token_ids"], params.max_tokens))
            raise ValueError("not on this device")

    monkeypatch.setattr(platforms, "current_platform", Strict, raising=False)
    with pytest.raises(ValueError, match="not on this device"):
        process(processor, [5], SamplingParams(max_tokens=3))
    assert seen == [([5], 3)]


# -- without a tokenizer -----------------------------------------------------------------------------


def test_ids_only_without_a_tokenizer():
    processor = InputProcessor(config(), None, [])
    settled = process(processor, [1, 2, 3]).sampling_params
    assert (settled.detokenize, settled.eos_token_id) == (False, 2)
    refused(processor, "prompt", prompt="Hello")
    refused(processor, "stop", prompt=[1], params=SamplingParams(stop=["x"]))
    refused(processor, "bad_words", prompt=[1], params=SamplingParams(bad_words=["x"]))
    with pytest.raises(VLLMValidationError, match="tokenizer"):
        processor.render_chat([{"role": "user", "content": "hi"}])


# -- conversations -----------------------------------------------------------------------------------


def test_a_conversation_becomes_a_prompt(processor):
    made = processor.render_chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert made["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert processor.tokenizer.decode(made["prompt_token_ids"]) == made["prompt"]


def test_a_conversation_may_use_another_template(processor):
    made = processor.render_chat(
        [{"role": "user", "content": "Hi"}],
        chat_template="{% for m in messages %}{% for p in m.content %}{{ p.text }}{{ tone }}{% endfor %}{% endfor %}",
        chat_template_kwargs={"tone": "!"},
    )
    assert made["prompt"] == "Hi!"


def test_server_defaults_are_at_hand(smollm2):
    processor = InputProcessor(config(generation={"temperature": 0.2, "max_new_tokens": 7}), smollm2, [])
    assert processor.default_sampling_params == {"temperature": 0.2, "max_tokens": 7}


def test_a_schema_travels_as_text(processor):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    _, request = processor.process_inputs("r", "Hello", params)
    assert json.loads(request.sampling_params.structured_outputs.json) == schema
    assert params.structured_outputs.json == schema, "the caller's own object is left alone"


def test_the_files_of_an_adapter_have_a_place(smollm2, tmp_path, monkeypatch):
    settings = config()
    settings.lora_config = LoRAConfig()
    processor = InputProcessor(settings, smollm2, [])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    adapter = LoRARequest("a", 1, "mine", "base")
    found = process(processor, lora_request=adapter).lora_request
    assert (found.lora_name, found.lora_int_id, found.lora_path) == ("a", 1, str(tmp_path / "mine"))
    assert found.base_model_name == "base"
    refused(processor, "lora_request", match="neither a folder nor", lora_request=LoRARequest("a", 1, "/no/where"))
    asked = []

    def fetch(repo_id, allow_patterns):
        asked.append((repo_id, allow_patterns))
        if "absent" in repo_id:
            raise OSError("secret")
        return str(tmp_path / "mine")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    found = process(processor, lora_request=LoRARequest("a", 1, "owner/repo")).lora_request
    assert found.lora_path == str(tmp_path / "mine")
    assert asked == [("owner/repo", ["adapter_config.json", "adapter_model.safetensors"])]
    refused(
        processor, "lora_request", match="did not give it: OSError", lora_request=LoRARequest("a", 1, "owner/absent")
    )
