"""What a model is run for, and what its files say about pooling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.config.hf_config import HFConfig
from hardpoint.config.model_facts import choose_model_class
from hardpoint.config.sections import ModelConfig
from hardpoint.config.sentence_transformers import read_sentence_model
from hardpoint.errors import ConfigError, ModelFileError


def chosen(*architectures: str, **fields: str) -> tuple[str, str, str]:
    """The class, what it is run for and how it is converted."""
    facts = fields.pop("facts", {})
    model = ModelConfig(model="m", **fields)
    model.hf_config = HFConfig({"architectures": list(architectures), **facts})
    found = choose_model_class(model)
    return found.architecture, model.runner_type, model.convert_type


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {}, ("LlamaForCausalLM", "generate", "none")),
        ("LlamaForCausalLM", {"runner": "pooling"}, ("LlamaForCausalLM", "pooling", "embed")),
        ("LlamaForCausalLM", {"convert": "classify"}, ("LlamaForCausalLM", "pooling", "classify")),
        ("LlamaModel", {}, ("LlamaForCausalLM", "pooling", "embed")),
        ("LlamaModel", {"runner": "generate"}, ("LlamaForCausalLM", "generate", "none")),
        ("Qwen3ForSequenceClassification", {}, ("Qwen3ForCausalLM", "pooling", "classify")),
        ("GPT2LMHeadModel", {}, ("GPT2LMHeadModel", "generate", "none")),
        ("LlamaChatModel", {}, ("LlamaForCausalLM", "generate", "none")),
        ("BertModel", {}, ("BertModel", "pooling", "none")),
        ("BertForSequenceClassification", {"convert": "embed"}, ("BertForSequenceClassification", "pooling", "none")),
    ],
)
def test_what_a_model_is_run_for(architecture, fields, expected):
    assert chosen(architecture, **fields) == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("BertModel", {"runner": "generate"}, "pooling model: leave --runner out"),
        ("LlamaForCausalLM", {"runner": "generate", "convert": "embed"}, "--convert embed makes a pooling model"),
        ("LlamaForCausalLM", {"runner": "pooling", "convert": "none"}, "does not support --runner pooling"),
        ("LlamaModel", {"facts": {"is_causal": False}}, "attends in both directions"),
    ],
)
def test_what_cannot_be(architecture, fields, words):
    with pytest.raises(ConfigError) as caught:
        chosen(architecture, **fields)
    assert words in str(caught.value)


def folder(tmp_path: Path, *modules: tuple[str, str], pooling: object = None, length: object = None) -> Path:
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if length is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return tmp_path


USUAL = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def test_a_folder_says_how_to_pool(tmp_path):
    assert read_sentence_model(tmp_path) is None
    modes = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "word_embedding_dimension": 8}
    found = read_sentence_model(folder(tmp_path, *USUAL, ("3_Dense", "Dense"), pooling=modes, length=77))
    assert (found.pooling, found.normalize, found.dense, found.max_seq_length) == ("LAST", True, ("3_Dense",), 77)


def test_newer_files_name_one_mode(tmp_path):
    assert read_sentence_model(folder(tmp_path, USUAL[1], pooling={"pooling_mode": "cls"})).pooling == "CLS"


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (USUAL, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        (USUAL, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "with pooling_mode_cls_token"),
        (USUAL, [], "holds no object"),
        ((("0", "WordEmbeddings"),), {}, "WordEmbeddings' are not supported"),
        ((("../x", "Pooling"),), {}, "leads out of the model"),
        ((("3", "Pooling"),), {}, "cannot be read"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path, modules, pooling, words):
    with pytest.raises(ModelFileError) as caught:
        read_sentence_model(folder(tmp_path, *modules, pooling=pooling))
    assert words in str(caught.value)


def test_damaged_files(tmp_path):
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelFileError, match="no list of modules"):
        read_sentence_model(tmp_path)
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(ModelFileError, match="is not JSON"):
        read_sentence_model(tmp_path)
