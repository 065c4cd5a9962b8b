"""Tokenizers of Hugging Face folders, against transformers reading the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from hardpoint.errors import ModelFileError
from hardpoint.front_end.tokenizers import load_tokenizer

TEXT = "hello there <turn> hello"


def write_folder(folder: Path, config: dict | None, *, template: bool = False, limits: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "ll", "hell", "hello", "<s>", "</s>", "<turn>"]
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    if limits:
        backend.enable_truncation(3)
        backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def config(**more) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False},
        "clean_up_tokenization_spaces": False,
        **more,
    }


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"additional_special_tokens": ["<turn>"]},
        {"added_tokens_decoder": {"262": {"content": "<turn>", "special": True}}},
    ],
    ids=str,
)
def test_ids_and_texts_are_those_of_transformers(tmp_path, template, flags):
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "model", config(**flags), template=template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for add in (True, False):
        assert ours.encode(TEXT, add_special_tokens=add) == theirs.encode(TEXT, add_special_tokens=add)
    ids = ours.encode(TEXT)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert len(ours) == len(theirs)


def test_training_limits_do_not_cut_or_fill_prompts(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", None, limits=True))
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_tokens_map_is_read_too(tmp_path):
    folder = write_folder(tmp_path / "model", None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}', encoding="utf-8")
    assert load_tokenizer(folder).eos_token == "</s>"


def test_chat_templates_by_place_and_name(tmp_path):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    folder = write_folder(tmp_path / "model", config(chat_template=named))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.chat_template, tokenizer.get_chat_template(tools=[{}])) == ("one", "two")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("three", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("own {{ bos_token }}", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.get_chat_template("rag") == "three"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "own <s>"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer.json", "<html>", "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "JSON object"),
    ],
)
def test_damaged_folders_are_refused_by_file(tmp_path, file, content, says):
    folder = write_folder(tmp_path / "model", config())
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=says):
        load_tokenizer(folder)
