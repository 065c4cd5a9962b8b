"""How each family of models marks its reasoning: whole, as streams cut at every place, and by token ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer, TokenizerParts

T, ANSWER = "Why?\n\nBecause ☃ 𝄞.", "It is 42.\n"
HARMONY = f"<|channel|>analysis<|message|>{T}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}<|call|>'

# parser, template arguments, the model's text, the reasoning, the content
GOLDEN = [
    ("deepseek_r1", {}, f"<think>\n{T}\n</think>\n\n{ANSWER}", T, ANSWER),
    ("deepseek_r1", {}, f"{T}</think>{ANSWER}", T, ANSWER),
    ("deepseek_r1", {}, T, T, None),
    ("deepseek_r1", {}, f"{T}</think>a</think>b", T, "a</think>b"),
    ("deepseek_r1", {}, f"{T}</thin", f"{T}</thin", None),
    ("deepseek_r1", {}, "", None, None),
    ("deepseek_v3", {}, ANSWER, None, ANSWER),
    ("deepseek_v3", {"thinking": True}, f"{T}</think>{ANSWER}", T, ANSWER),
    ("qwen3", {}, f"<think>\n{T}\n</think>\n\n{ANSWER}", T, ANSWER),
    ("qwen3", {}, f"{T}\n</think>\n\n{ANSWER}", T, ANSWER),
    ("qwen3", {"enable_thinking": False}, ANSWER, None, ANSWER),
    ("qwen3", {"enable_thinking": False}, f"<think>\n\n</think>\n\n{ANSWER}", None, ANSWER),
    ("glm45", {}, f"\n<think>{T}</think>\n{ANSWER}", T, ANSWER),
    ("holo2", {"thinking": False}, ANSWER, None, ANSWER),
    ("kimi_k2", {}, f"<think>{T}<|tool_calls_section_begin|>x", T, "<|tool_calls_section_begin|>x"),
    ("granite", {}, f"Here is my thought process:\n{T}\nHere is my response:\n{ANSWER}", T, ANSWER),
    ("granite", {}, f"Here's my thought process: {T} Here's my response: {ANSWER}", T, ANSWER),
    ("granite", {}, "Here is my recipe", None, "Here is my recipe"),
    ("mistral", {}, f"[THINK]{T}[/THINK]{ANSWER}", T, ANSWER),
    ("mistral", {}, f"{ANSWER}[THINK]", None, f"{ANSWER}[THINK]"),
    ("hunyuan_a13b", {}, f"<think>\n{T}\n</think>\n<answer>\n42\n</answer>", T, "42"),
    ("ernie45", {}, f"{T}\n</think>\n\n<response>\n42\n</response>\n", T, "42\n"),
    ("step3", {}, f"{T}</think>{ANSWER}", T, ANSWER),
    ("step3p5", {}, f"{T}</think>{ANSWER}", T, ANSWER),
    ("minimax_m2", {}, f"{T}</think>{ANSWER}", T, ANSWER),
    ("minimax_m2_append_think", {}, f"{T}</think>{ANSWER}", None, f"{T}</think>{ANSWER}"),
    ("nemotron_v3", {}, f"<think>{T}</think>{ANSWER}", T, ANSWER),
    ("olmo3", {}, f"<think>{T}</think>{ANSWER}", T, ANSWER),
    ("seed_oss", {}, f"<seed:think>{T}</seed:think>{ANSWER}", T, ANSWER),
    ("identity", {}, f"<think>{T}", None, f"<think>{T}"),
    ("openai_gptoss", {}, HARMONY, T, ANSWER),
    ("openai_gptoss", {}, f"<|channel|>analysis<|message|>{T}<|end|>{CALL}", T,
     CALL.removeprefix("<|start|>assistant").join(("<|start|>assistant", ""))),
    ("openai_gptoss", {}, "no channels", None, "no channels"),
]  # fmt: skip


def tokenizer_of(*special, words=()):
    """Byte-level with some tokens of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|turn|>", *special])
    backend.add_tokens(list(words))
    return Tokenizer(TokenizerParts(backend, "tiny"))


# The marks as tokens of their own, as special ones, and as words of many tokens.
TOKENIZERS = {
    "words": tokenizer_of(),
    "tokens": tokenizer_of(words=["<think>", "</think>"]),
    "special": tokenizer_of("<think>", "</think>", "[THINK]", "[/THINK]"),
}


def parser_of(name, tokenizer="words", **kwargs):
    return registry("reasoning_parsers").load(name)(TOKENIZERS[tokenizer], chat_template_kwargs=kwargs)


def streamed(parser, pieces):
    text, found = "", []
    for piece in pieces:
        found.append(parser.extract_reasoning_streaming(text, text + piece, piece, [], [], []))
        text += piece
    found = [delta for delta in [*found, parser.finish_streaming()] if delta]
    parts = ("".join(getattr(delta, part) or "" for delta in found) or None for part in ("reasoning", "content"))
    return tuple(parts)


def test_every_parser_has_a_golden_text():
    assert {name for name, *_ in GOLDEN} == set(BUILTINS["reasoning_parsers"])


@pytest.mark.parametrize(("name", "kwargs", "text", "reasoning", "content"), GOLDEN)
def test_golden(name, kwargs, text, reasoning, content):
    assert parser_of(name, **kwargs).extract_reasoning(text, None) == (reasoning, content)
    assert streamed(parser_of(name, **kwargs), list(text)) == (reasoning, content)
    for place in range(len(text) + 1):
        pieces = [text[:place], text[place:]]
        assert streamed(parser_of(name, **kwargs), pieces) == (reasoning, content), place


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("prompt", "ended", "text", "found"),
    [
        ("<|turn|>user hi<|turn|>assistant ", False, "<think>a</think>b", ("a", "b")),
        ("<|turn|>user hi<|turn|>assistant ", False, "just b", (None, "just b")),
        ("<|turn|>assistant <think>\n", False, "a</think>b", ("a", "b")),
        ("<|turn|>assistant <think>\n\n</think>\n\n", True, "b </think>", (None, "b </think>")),
        # What an earlier turn thought ends nothing.
        (
            "<|turn|>assistant <think>x</think>y<|turn|>user hi<|turn|>assistant ",
            False,
            "<think>a</think>b",
            ("a", "b"),
        ),
    ],
)
def test_the_prompt_says_where_an_answer_begins(kind, prompt, ended, text, found):
    ids = TOKENIZERS[kind].encode(prompt)
    parser = parser_of("qwen3", kind)
    assert parser.is_reasoning_end(ids) == ended
    parser.adjust_initial_state_from_prompt(ids)
    assert parser.extract_reasoning(text, None) == found
    assert streamed(parser, list(text)) == found
    assert parser.has_engine_confirmed_reasoning_end() == (found[1] is not None)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_say_when_reasoning_is_over(kind):
    tokenizer = TOKENIZERS[kind]
    prompt, answer = tokenizer.encode("hi </think> <|turn|>"), tokenizer.encode("<think>ab</think>cd")
    parser, over = parser_of("qwen3", kind), []
    for place in range(len(answer)):
        ids = [*prompt, *answer[: place + 1]]
        over.append(parser.is_reasoning_end_streaming(ids, [answer[place]]))
    assert over.count(True) == 1
    end = over.index(True) + 1
    assert tokenizer.decode(answer[:end]) == "<think>ab</think>"
    assert tokenizer.decode(parser.extract_content_ids(answer)) == "cd"
    assert parser.extract_content_ids(tokenizer.encode("<think>ab")) == []
    assert parser.is_reasoning_end([*prompt, *answer])
    assert parser.count_reasoning_tokens(answer) >= 2
    assert parser.count_reasoning_tokens(tokenizer.encode("cd")) == 2, "without a mark it is all reasoning"


def test_tokens_that_are_not_reasoning_are_not_counted():
    parser = parser_of("mistral", "special")
    ids = TOKENIZERS["special"].encode("[THINK]abc[/THINK]d")
    assert parser.count_reasoning_tokens(ids) == 3
    assert parser.count_reasoning_tokens(TOKENIZERS["special"].encode("abc")) == 0


def test_special_marks_are_kept_in_the_text():
    for name, kind, kept in (("mistral", "special", True), ("mistral", "words", False), ("qwen3", "tokens", False)):
        request = SimpleNamespace(skip_special_tokens=True)
        parser_of(name, kind).adjust_request(request)
        assert request.skip_special_tokens is not kept
    request = SimpleNamespace(skip_special_tokens=True)
    parser_of("openai_gptoss").adjust_request(request)
    assert not request.skip_special_tokens


def test_harmony_by_ids():
    tokenizer, parser = TOKENIZERS["words"], parser_of("openai_gptoss")
    ids = tokenizer.encode(HARMONY.removesuffix("<|return|>"))
    assert parser.is_reasoning_end(ids)
    assert not parser.is_reasoning_end(tokenizer.encode(f"<|channel|>analysis<|message|>{T}"))
    assert not parser.is_reasoning_end([*ids, *tokenizer.encode("<|start|>user<|message|>hi<|start|>assistant")])
    assert tokenizer.decode(parser.extract_content_ids(ids)) == ANSWER
    assert (parser.reasoning_start_str or "").startswith("<|channel|>analysis")


def test_the_vocabulary_is_asked_for_once_however_many_answers_are_read():
    asked = []

    class Counting:
        all_special_ids = ()

        def get_vocab(self):
            asked.append(1)
            return {"<think>": 1, "</think>": 2}

    tokenizer = Counting()
    for _ in range(3):
        parser = registry("reasoning_parsers").load("qwen3")(tokenizer)
        assert parser.is_reasoning_end([1, 2])
    assert len(asked) == 1
