"""LLaVA in whole engines, held against transformers: company, chunks, cached prefixes, bad images, own processors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hardpoint.contracts.multimodal import (
    MULTIMODAL_REGISTRY,
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)
from hardpoint.errors import ConfigError, VLLMValidationError
from hardpoint.front_end.multimodal.images import ClipImageProcessor
from hardpoint.llm import LLM
from hardpoint.types.multimodal import MultiModalFieldConfig
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.models.llava import LlavaForConditionalGeneration
from hardpoint.worker.models.registry import ModelRegistry
from tiny_llava import TOKENS, VISION, data_url, expected_logits, picture, write_tiny_llava

SIDE = VISION["image_size"]
SIZES: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "num_gpu_blocks_override": 40, "block_size": 8,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, logprobs=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("llava")
    return write_tiny_llava(folder), folder


@pytest.fixture(scope="module")
def chunked(checkpoint) -> Iterator[LLM]:
    """An engine whose steps hold less than two images."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield LLM(model=str(checkpoint[1]), max_num_batched_tokens=24, **SIZES)


def shown(text: str, *images: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [picture(seed) for seed in images]}}


def check(model: Any, output: Any, images: Sequence[int]) -> None:
    """Every log-probability of a request is transformers'."""
    prepare = ClipImageProcessor({"size": SIDE, "crop_size": SIDE})
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    expected = expected_logits(model, ids, [prepare(picture(seed)) for seed in images]).log_softmax(-1)
    rows = [*(output.prompt_logprobs or ())[1:], *output.outputs[0].logprobs]
    assert len(rows) == len(ids) - 1
    for place, row in enumerate(rows):
        for token, found in row.items():
            assert abs(found.logprob - float(expected[place, token])) < 1e-4, place


def test_mixed_requests_in_chunks_answer_as_transformers(checkpoint, chunked):
    prompts = [
        shown("Look: <image> and <image>! What is it?", 1, 2),
        "only words here",
        shown("<image>", 3),
        shown("twice <image>, the same <image>", 2, 2),
    ]
    assert chunked.llm_engine.model_config.architecture == "LlavaForConditionalGeneration"
    outputs = chunked.generate(prompts, PARAMS, use_tqdm=False)
    for output, images in zip(outputs, ([1, 2], [], [3], [2, 2]), strict=True):
        check(checkpoint[0], output, images)
    assert len(outputs[2].prompt_token_ids) == TOKENS


def test_cached_prefixes_know_their_images(checkpoint, chunked):
    # A request with prompt log-probabilities computes its whole prompt: these look only at the answer.
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    text = "a long beginning of a prompt, then <image> and a question about it"

    def ask(image: int) -> Any:
        output = chunked.generate([shown(text, image)], params, use_tqdm=False)[0]
        prepare = ClipImageProcessor({"size": SIDE, "crop_size": SIDE})
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = expected_logits(checkpoint[0], ids, [prepare(picture(image))]).log_softmax(-1)
        start = len(output.prompt_token_ids) - 1
        for place, row in enumerate(output.outputs[0].logprobs):
            for token, found in row.items():
                assert abs(found.logprob - float(expected[start + place, token])) < 1e-4
        return output

    before = ask(11).prompt_token_ids.index(chunked.get_tokenizer().encode("<image>")[0])
    again, other = ask(11), ask(12)
    assert again.num_cached_tokens > before + TOKENS
    # Up to the block in which the image begins.
    assert other.num_cached_tokens == before // 8 * 8
    stats = chunked.llm_engine.input_processor.media.take_stats()
    assert stats is not None
    assert stats.hits >= 1
    assert stats.queries > stats.hits


def test_chats_hold_images_where_they_stand(checkpoint, chunked):
    parts = [
        {"type": "text", "text": "first"},
        {"type": "image_url", "image_url": {"url": data_url(picture(4))}},
        {"type": "text", "text": "then"},
        {"type": "image_pil", "image_pil": picture(5)},
    ]
    output = chunked.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)[0]
    check(checkpoint[0], output, [4, 5])
    words = chunked.get_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)
    assert words.index("first") < words.index("<image>") < words.index("then") < words.rindex("<image>")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (shown("no place", 1), "0 image placeholder"),
        (shown("<image> <image>", 1), "more image placeholders than the 1"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "path.png"}}, "image 0 cannot be used"),
        ({"prompt": "<image>", "multi_modal_data": {"image": b"GIF"}}, "image 0 cannot be used"),
        ({"prompt": "<image>", "multi_modal_data": {"audio": [1]}}, "takes image, not audio"),
        ({**shown("<image>", 1), "mm_processor_kwargs": {"crop_size": 8}}, "the vision tower takes 16 x 16"),
        ({**shown("<image>", 1), "mm_processor_kwargs": {"zoom": 8}}, "'zoom' is not known"),
        ({**shown("<image>", 1), "media_io_kwargs": {"image": {"zoom": 8}}}, "zoom is not known"),
        ({**shown("<image>", 1), "multi_modal_uuids": {"image": ["a"]}}, "named by their content"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(chunked, prompt, text):
    with pytest.raises(VLLMValidationError, match=text):
        chunked.generate([prompt], PARAMS, use_tqdm=False)


def test_an_image_that_fails_in_the_worker_hurts_only_its_request(checkpoint, chunked):
    def break_one(model: Any) -> None:
        right = model.embed_multimodal

        def embed(pixel_values: Any) -> Any:
            if float(pixel_values.amax() - pixel_values.amin()) < 1:
                raise ValueError("too dull")
            return right(pixel_values=pixel_values)

        model.embed_multimodal = embed

    def mend(model: Any) -> None:
        del model.embed_multimodal

    dull = {"prompt": "<image> what?", "multi_modal_data": {"image": np.zeros((9, 9, 3), np.uint8)}}
    chunked.apply_model(break_one)
    try:
        outputs = chunked.generate([dull, shown("<image> what?", 3), dull, "words"], PARAMS, use_tqdm=False)
    finally:
        chunked.apply_model(mend)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["error", "length", "error", "length"]
    check(checkpoint[0], outputs[1], [3])
    # Nothing of it is left: the same image is well now.
    again = chunked.generate([dull], PARAMS, use_tqdm=False)[0]
    assert again.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        {"vision_feature_layer": [1, -2], "multimodal_projector_bias": False},
    ],
)
def test_what_is_taken_from_the_tower(changes, tmp_path):
    model = write_tiny_llava(tmp_path, **changes)
    llm = LLM(model=str(tmp_path), disable_chunked_mm_input=True, max_num_batched_tokens=40, **SIZES)
    outputs = llm.generate([shown("see <image>, <image>", 1, 2), shown("<image>", 7)], PARAMS, use_tqdm=False)
    check(model, outputs[0], [1, 2])
    check(model, outputs[1], [7])


def test_limits(checkpoint):
    llm = LLM(model=str(checkpoint[1]), limit_mm_per_prompt={"image": 1}, **SIZES)
    with pytest.raises(VLLMValidationError, match="At most 1 image"):
        llm.generate([shown("<image><image>", 1, 2)], PARAMS, use_tqdm=False)
    assert llm.generate([shown("<image>", 1)], PARAMS, use_tqdm=False)[0].outputs[0].finish_reason == "length"
    words = LLM(model=str(checkpoint[1]), language_model_only=True, **SIZES)
    check(checkpoint[0], words.generate(["only words"], PARAMS, use_tqdm=False)[0], [])
    with pytest.raises(VLLMValidationError, match="At most 0 image"):
        words.generate([shown("<image>", 1)], PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mm_processor_kwargs": {"size": 8, "crop_size": 8}}, "the vision tower takes 16 x 16"),
        ({"mm_processor_kwargs": {"zoom": 1}}, "'zoom' is not known"),
        ({"limit_mm_per_prompt": {"image": -1}}, "--limit-mm-per-prompt"),
        ({"media_io_kwargs": {"video": {"fps": 1}}}, "--media-io-kwargs"),
        ({"disable_chunked_mm_input": True, "max_num_batched_tokens": 12}, "does not fit into a step"),
        ({"mm_encoder_tp_mode": "data"}, "mm_encoder_tp_mode"),
    ],
)
def test_options_that_cannot_be_served(checkpoint, options, text):
    with pytest.raises(ConfigError, match=text):
        LLM(model=str(checkpoint[1]), **{**SIZES, **options})


def test_a_model_of_text_takes_no_image(tiny_llama):
    llm = LLM(model=str(tiny_llama), **SIZES)
    with pytest.raises(VLLMValidationError, match="this model reads text"):
        llm.generate([shown("<image>", 1)], PARAMS, use_tqdm=False)


class BrightInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 2}

    def get_mm_max_tokens_per_item(self, seq_len, mm_counts):
        return {"image": TOKENS + 1}


class BrightDummies(BaseDummyInputsBuilder):
    def get_dummy_text(self, mm_counts):
        return "<image>" * mm_counts.get("image", 0)

    def get_dummy_mm_data(self, seq_len, mm_counts, mm_options=None):
        return {"image": [picture(0)] * mm_counts.get("image", 0)}


class BrightProcessor(BaseMultiModalProcessor):
    """Images by their own rule, and a token before them that gets no embedding."""

    def _call_hf_processor(self, prompt, mm_data, mm_kwargs, tok_kwargs):
        prepare = ClipImageProcessor({"size": SIDE, "crop_size": SIDE})
        return {"pixel_values": np.stack([prepare(image) for image in mm_data["images"]])}

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        return {"pixel_values": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs) -> Sequence[PromptUpdate]:
        from hardpoint.contracts.multimodal import PromptUpdateDetails

        token = self.info.get_hf_config().image_token_index
        filling = PromptUpdateDetails.select_token_id([5, *[token] * TOKENS], token)
        return [PromptReplacement("image", "<image>", filling)]


def test_a_plugins_model_brings_its_own_processor(checkpoint):
    class BrightLlava(LlavaForConditionalGeneration):
        pass

    globals()["BrightLlava"] = BrightLlava
    BrightLlava.__qualname__ = "BrightLlava"
    MULTIMODAL_REGISTRY.register_processor(BrightProcessor, info=BrightInfo, dummy_inputs=BrightDummies)(BrightLlava)
    ModelRegistry.register_model("BrightLlava", BrightLlava)
    llm = LLM(model=str(checkpoint[1]), hf_overrides={"architectures": ["BrightLlava"]}, **SIZES)
    output = llm.generate([shown("see <image>, <image>.", 8, 9)], PARAMS, use_tqdm=False)[0]
    assert output.prompt_token_ids.count(5) == 2
    check(checkpoint[0], output, [8, 9])
    with pytest.raises(VLLMValidationError, match="At most 2 image"):
        llm.generate([shown("<image><image><image>", 1, 2, 3)], PARAMS, use_tqdm=False)


def test_without_pillow_text_is_served_and_images_are_refused(chunked, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(VLLMValidationError, match=r"pip install 'hardpoint\[vision\]'"):
        chunked.generate([{"prompt": "<image>", "multi_modal_data": {"image": b"x"}}], PARAMS, use_tqdm=False)
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    with pytest.raises(VLLMValidationError, match=r"pip install 'hardpoint\[vision\]'"):
        chunked.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)
    assert chunked.generate(["words"], PARAMS, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_preempted_requests_see_their_images_again(checkpoint):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [shown("word " * number + "<image> and <image>!", number % 3, number) for number in range(6)]
    found = []
    for blocks, settings in ((60, {}), (18, {}), (18, {"async_scheduling": False})):
        sizes = {**SIZES, "num_gpu_blocks_override": blocks, "max_num_seqs": 6, "max_model_len": 120, **settings}
        llm = LLM(model=str(checkpoint[1]), max_num_batched_tokens=24, disable_log_stats=False, **sizes)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        preempted = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
        assert bool(preempted) == (blocks == 18)
    assert found[0] == found[1] == found[2]
    two = llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=5, n=2), use_tqdm=False)[0].outputs
    assert [list(output.token_ids) for output in two] == [found[0][0][:5]] * 2
