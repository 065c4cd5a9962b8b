"""Constraints on a tiny model with a real tokenizer: whatever the batch does, an answer keeps its own."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from odd_backends import DashReasoning

from hardpoint.extensions.registry import isolated, registry
from hardpoint.testing import engine_here
from hardpoint.types.sampling_params import SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "count", "flags"],
    "additionalProperties": False,
}
REGEX = "[a-d]{3,9}-[0-9]{2}"
CHOICES = ["red", "green", "a longer one"]
GRAMMAR = 'root ::= item ("," item)*\nitem ::= "x" | "yy"'


def wants(**kind) -> StructuredOutputsParams:
    return StructuredOutputsParams(**kind)


def keeps(asked: StructuredOutputsParams | None, text: str) -> bool:
    if asked is None:
        return True
    if asked.json is not None:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if asked.regex is not None:
        return re.fullmatch(asked.regex, text) is not None
    if asked.choice is not None:
        return text in asked.choice
    return re.fullmatch("(x|yy)(,(x|yy))*", text) is not None


MIX = [None, *(wants(json=SCHEMA), wants(regex=REGEX), wants(choice=CHOICES), wants(grammar=GRAMMAR))]


def run(llm, asked, prompts=None, **params):
    params = {"max_tokens": 100, "temperature": 1.0, "seed": 1, **params}
    many = [SamplingParams(structured_outputs=one, **params) for one in asked]
    prompts = prompts or [f"Prompt number {place % 3}, with a shared beginning" for place in range(len(asked))]
    return llm.generate(prompts, many, use_tqdm=False)


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "ahead"])
def llm(request, tiny_llama):
    # Little room: prompts are cut into chunks, requests lose their blocks, beginnings are shared.
    with engine_here(
        tiny_llama, max_num_batched_tokens=24, max_num_seqs=6, num_gpu_blocks_override=24, enable_prefix_caching=True,
        async_scheduling=request.param, block_size=16,
    ) as llm:  # fmt: skip
        yield llm


def test_a_crowded_engine_keeps_every_constraint(llm):
    asked = MIX * 4
    outputs = [one.outputs[0] for one in run(llm, asked, max_tokens=60)]
    bound = [(one, out) for one, out in zip(asked, outputs, strict=True) if one is not None]
    for one, out in bound:
        assert out.finish_reason in ("stop", "length"), out.stop_reason
        assert out.finish_reason == "length" or keeps(one, out.text), (one, out.text)
    assert sum(out.finish_reason == "stop" for _, out in bound) > len(bound) // 2
    # The others are not touched: the same text as alone.
    alone = run(llm, [None], [f"Prompt number {0}, with a shared beginning"], max_tokens=60)[0].outputs[0]
    assert outputs[0].token_ids == alone.token_ids


def test_a_complete_text_ends_without_an_end_token(llm):
    (out,) = run(llm, [wants(choice=["red"])])[0].outputs
    assert (out.text, out.finish_reason, out.stop_reason) == ("red", "stop", None)


@pytest.mark.parametrize("params", [{"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "ignore_eos": True}])
def test_a_complete_text_ends_whatever_else_is_wished(llm, params):
    for asked in MIX[2:4]:
        (out,) = run(llm, [asked], **params)[0].outputs
        assert out.finish_reason == "stop"
        assert keeps(asked, out.text)


def test_min_tokens_hold_as_long_as_the_grammar_can_go_on(llm):
    (out,) = run(llm, [wants(regex="[ab]{2,200}")], min_tokens=30, max_tokens=90)[0].outputs
    assert len(out.token_ids) >= 30
    assert re.fullmatch("[ab]{2,200}", out.text)


def test_stop_tokens_and_stop_strings_end_earlier(llm):
    text = run(llm, [wants(regex="[ab]{50}")])[0].outputs[0]
    token = text.token_ids[3]
    (out,) = run(llm, [wants(regex="[ab]{50}")], stop_token_ids=[token])[0].outputs
    assert out.finish_reason == "stop"
    assert out.stop_reason == token
    (out,) = run(llm, [wants(regex="[ab]{50}")], stop=[text.text[4:6]])[0].outputs
    assert out.stop_reason == text.text[4:6]


def test_several_answers_with_scores_of_one_request(llm):
    outputs = run(llm, [wants(regex=REGEX)], n=4, logprobs=2, seed=None)[0].outputs
    assert len({out.text for out in outputs}) > 1
    for out in outputs:
        assert keeps(wants(regex=REGEX), out.text)
        assert len(out.logprobs) == len(out.token_ids)
        for token, scores in zip(out.token_ids, out.logprobs, strict=True):
            assert scores[token].logprob > float("-inf")


def test_what_cannot_be_kept_is_an_error_of_its_own_request(llm):
    bad = [
        wants(regex="(unclosed"),
        wants(json={"type": "array", "uniqueItems": True}),
        wants(structural_tag="{"),
    ]
    outputs = [one.outputs[0] for one in run(llm, [*bad, wants(choice=CHOICES), None])]
    assert [out.finish_reason for out in outputs[:3]] == ["error"] * 3
    for out, word in zip(outputs, ("unclosed", "uniqueItems", "structural tag"), strict=False):
        assert word in out.stop_reason
    assert outputs[3].text in CHOICES
    assert outputs[4].finish_reason in ("stop", "length")


@pytest.mark.parametrize("style", [{"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]{3}"}])
def test_white_space_is_as_wished(llm, style):
    (out,) = run(llm, [wants(json=SCHEMA, **style)])[0].outputs
    keeps(wants(json=SCHEMA), out.text)
    found = set(re.findall(r"\s+", out.text))
    assert found == (set() if "disable_any_whitespace" in style else {"   "})


@pytest.fixture
def odd_engine(tiny_llama):
    with isolated():
        registry("structured_output_backends").register("odd", "odd_backends:OddBackend")
        settings = {"backend": "odd", "compile_timeout_s": 8.0, "max_compile_memory_mb": 300}
        with engine_here(tiny_llama, structured_outputs_config=settings) as llm:
            yield llm


def test_a_compiler_that_misbehaves_is_ended_and_started_again(odd_engine):
    outputs = run(odd_engine, [wants(regex=word) for word in ("hang", "grow", "crash", "[ab]{3}")] + [None])
    reasons = [one.outputs[0].stop_reason for one in outputs[:3]]
    assert "longer than 8 s" in reasons[0]
    assert "more than 300 MiB" in reasons[1]
    assert "ended the compiler" in reasons[2]
    assert re.fullmatch("[ab]{3}", outputs[3].outputs[0].text)
    assert outputs[4].outputs[0].finish_reason in ("stop", "length")


def test_a_grammar_that_fails_later_ends_its_request_alone(odd_engine):
    outputs = [one.outputs[0] for one in run(odd_engine, [wants(regex="fail later"), wants(regex="[ab]{9}"), None])]
    assert "the grammar is lost" in outputs[0].stop_reason
    assert re.fullmatch("[ab]{9}", outputs[1].text)
    assert outputs[2].finish_reason in ("stop", "length")


def test_what_was_compiled_is_remembered(odd_engine, tmp_path):
    log = tmp_path / "compiled"
    asked = wants(regex=f"count {log}")
    for _ in range(3):
        run(odd_engine, [asked, asked])
    pids = log.read_text().split()
    # On trial and for use; two requests at the same time may both have been first.
    assert 2 <= len(pids) <= 4


@pytest.mark.parametrize("binds_all", [False, True])
def test_the_constraint_begins_when_the_reasoning_is_over(tiny_llama, binds_all):
    asked = wants(regex="[ab]{6}")
    with isolated():
        registry("reasoning_parsers").register("dash", "odd_backends:DashReasoning")
        settings = {"reasoning_parser": "dash", "enable_in_reasoning": binds_all}
        with engine_here(tiny_llama, structured_outputs_config=settings) as llm:
            outputs = [one.outputs[0] for one in run(llm, [asked] * 4, [[1, 2, 3 + 4 * place] for place in range(4)])]
            (at_once,) = run(llm, [asked], [[1, 2, 8]])[0].outputs
    assert re.fullmatch("[ab]{6}", at_once.text), "the prompt has ended the reasoning"
    for out in outputs:
        thought = next((place for place, token in enumerate(out.token_ids) if token in DashReasoning.ENDS), None)
        if binds_all:
            assert re.fullmatch("[ab]{6}", out.text)
        elif thought is not None:
            rest = llm.get_tokenizer().decode(out.token_ids[thought + 1 :])
            assert out.finish_reason == "stop"
            assert re.fullmatch("[ab]{6}", rest)


@pytest.fixture(scope="module")
def thinker(tiny_llama):
    """A server whose parser takes an answer without a start mark for content."""
    with engine_here(tiny_llama, structured_outputs_config={"reasoning_parser": "qwen3"}) as llm:
        yield llm


@pytest.mark.parametrize("regex", ["[ab]{6}", "<t[ab]{6}", "<(think>?)?[ab]{6}"])
def test_an_answer_is_bound_from_its_start_or_begins_with_reasoning(thinker, regex):
    asked = wants(regex=regex)
    encode = thinker.get_tokenizer().encode
    [angle] = encode("<", add_special_tokens=False)
    for bias in (None, {angle: 100.0}, {angle: -100.0}):
        outputs = run(thinker, [asked] * 6, seed=None, logit_bias=bias, max_tokens=24)
        for out in (one.outputs[0] for one in outputs):
            bound = re.fullmatch(regex, out.text) is not None
            assert bound or out.text.startswith("<think>"), out.text
            assert not bound or out.finish_reason == "stop"
            if bias is not None and bias[angle] > 0 and not regex.startswith("<"):
                assert not bound, "the model wanted to reason"


def test_what_follows_marked_reasoning_is_bound(tiny_llama):
    with isolated():
        registry("reasoning_parsers").register("angle", "odd_backends:AngleReasoning")
        with engine_here(tiny_llama, structured_outputs_config={"reasoning_parser": "angle"}) as llm:
            encode = llm.get_tokenizer().encode
            # Few tokens to draw from: sooner or later the reasoning ends.
            allowed = sorted({encode(letter, add_special_tokens=False)[0] for letter in "ab<>"})
            outputs = run(
                llm,
                [wants(regex="[ab]{6}")] * 24,
                seed=None,
                allowed_token_ids=allowed,
                max_tokens=90,
                temperature=50.0,
            )
    texts = [one.outputs[0].text for one in outputs]
    assert all(re.fullmatch("[ab]{6}|<<[ab<]*>[ab]{6}|<<[ab<]{80,}.*", text) for text in texts), texts
    assert {text[:2] == "<<" for text in texts} == {True, False}
    assert any(re.fullmatch("<<[ab<]*>[ab]{6}", text) for text in texts), texts


def test_a_parser_for_models_that_do_not_reason_waits_for_nothing(tiny_llama):
    with engine_here(tiny_llama, structured_outputs_config={"reasoning_parser": "identity"}) as llm:
        assert re.fullmatch("[ab]{6}", run(llm, [wants(regex="[ab]{6}")])[0].outputs[0].text)


def test_thousands_of_choices(llm):
    choices = [f"choice number {n}" for n in range(9_000)]
    (output,) = run(llm, [wants(choice=choices)])
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in choices
