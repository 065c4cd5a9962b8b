"""The datasets of `hardpoint bench`."""

from __future__ import annotations

import argparse
import json

import pytest

from hardpoint.cli.bench import datasets
from hardpoint.config.arguments import FlagError, FlexibleArgumentParser


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf):
    return datasets.tokenizer_of(str(smollm2_gguf))


def arguments(*words) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    datasets.add_arguments(parser, num_prompts=5)
    return parser.parse_args(list(words))


def test_random_prompts_have_the_asked_length_and_differ(tokenizer):
    found = datasets.asks(arguments("--random-input-len", "40", "--random-output-len", "6"), tokenizer)
    assert len(found) == 5
    assert len({ask.prompt for ask in found}) == 5
    for ask in found:
        assert ask.output_tokens == 6
        assert ask.input_tokens == len(tokenizer.encode(ask.prompt))
        assert abs(ask.input_tokens - 40) <= 2


def test_the_seed_decides(tokenizer):
    def prompts(seed):
        return [ask.prompt for ask in datasets.asks(arguments("--input-len", "9", "--seed", seed), tokenizer)]

    assert prompts("1") == prompts("1") != prompts("2")


def test_lengths_are_drawn_from_a_range(tokenizer):
    flags = ["--input-len", "40", "--output-len", "20", "--num-prompts", "30"]
    found = datasets.asks(arguments(*flags, "--random-range-ratio", '{"input": 0.5, "output": 0}'), tokenizer)
    assert {ask.output_tokens for ask in found} == {20}
    lengths = [ask.input_tokens for ask in found]
    assert 18 <= min(lengths) < 35
    assert 45 < max(lengths) <= 62


def test_a_prefix_is_shared(tokenizer):
    found = datasets.asks(arguments("--input-len", "10", "--random-prefix-len", "30"), tokenizer)
    beginnings = {ask.prompt[:40] for ask in found}
    assert len(beginnings) == 1
    assert all(36 <= ask.input_tokens <= 42 for ask in found)


def test_sharegpt(tokenizer, tmp_path):
    def turns(*texts):
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    entries = [turns("What is the capital of France?", "It is Paris, of course."), turns("Hi", "Ho"), turns("alone"), 7]
    path = tmp_path / "share.json"
    path.write_text(json.dumps(entries))
    words = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    found = datasets.asks(arguments(*words, "--num-prompts", "2"), tokenizer)
    # What is too short is left out, and what is left is repeated.
    assert [ask.prompt for ask in found] == ["What is the capital of France?"] * 2
    assert found[0].output_tokens == len(tokenizer.encode("It is Paris, of course.", add_special_tokens=False))
    assert len(datasets.asks(arguments(*words, "--no-oversample"), tokenizer)) == 1
    assert datasets.asks(arguments(*words, "--sharegpt-output-len", "3"), tokenizer)[0].output_tokens == 3
    with pytest.raises(FlagError, match="--sharegpt-output-len is needed"):
        datasets.asks(arguments(*words), None)


def test_custom(tmp_path, tokenizer):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 5}\n\n{"prompt": "c", "output_tokens": 6}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle", "--num-prompts", "2"]
    assert [ask.output_tokens for ask in datasets.asks(arguments(*words), None)] == [256, 256]
    assert [ask.output_tokens for ask in datasets.asks(arguments(*words, "--custom-output-len=-1"), None)] == [5, 6]
    assert [ask.output_tokens for ask in datasets.asks(arguments(*words, "--output-len", "2"), None)] == [2, 2]
    found = datasets.asks(arguments(*words), tokenizer)
    assert [ask.input_tokens for ask in found] == [len(tokenizer.encode("a b")), len(tokenizer.encode("c"))]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"prompt": 3}', "line 1: `prompt` or `output_tokens` is missing"),
        ("", "holds no prompt"),
    ],
)
def test_files_that_are_not_what_they_should_be(text, says, tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(FlagError, match=says):
        datasets.asks(arguments("--dataset-name", "custom", "--dataset-path", str(path)), None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--random-range-ratio", "1"], r"outside \[0, 1\)"),
        (["--random-range-ratio", "x"], "neither a number"),
        (["--input-len", "0"], "at least one token"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "there is no file"),
    ],
)
def test_flags_that_make_no_sense(words, says, tokenizer):
    with pytest.raises(FlagError, match=says):
        datasets.asks(arguments(*words), tokenizer)


def test_random_prompts_need_a_tokenizer():
    with pytest.raises(FlagError, match="there is no tokenizer"):
        datasets.asks(arguments(), None)
