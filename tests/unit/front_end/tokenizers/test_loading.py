"""Which tokenizer a model gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint.config.sections import ModelConfig
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.front_end.tokenizers import TokenizerLike, get_tokenizer, load_tokenizer


def test_a_gguf_model_has_its_own(smollm2_gguf):
    config = ModelConfig(model=str(smollm2_gguf))
    tokenizer = get_tokenizer(config)
    assert isinstance(tokenizer, TokenizerLike)
    assert tokenizer.encode("Hello world") == [19556, 905]


def test_the_resolved_path_wins_over_the_name(smollm2_gguf):
    config = ModelConfig(model="some-name")
    config.tokenizer_path = str(smollm2_gguf)
    assert get_tokenizer(config).name_or_path == str(smollm2_gguf)


def test_none_where_none_is_wanted():
    assert get_tokenizer(ModelConfig(model="nowhere", skip_tokenizer_init=True)) is None


def test_unknown_modes_are_refused_by_name(smollm2_gguf):
    with pytest.raises(ConfigError, match="mistral"):
        get_tokenizer(ModelConfig(model=str(smollm2_gguf), tokenizer_mode="mistral"))


def test_a_path_that_is_neither_is_refused(tmp_path):
    page = tmp_path / "page.gguf"
    page.write_text("<html>", encoding="utf-8")
    for path in (page, tmp_path / "missing"):
        with pytest.raises(ModelFileError, match=path.name):
            load_tokenizer(path)


def test_no_torch_and_no_transformers(smollm2_gguf):
    code = (
        "import sys; from hardpoint.front_end.tokenizers import load_tokenizer; "
        "import hardpoint.front_end.inputs, hardpoint.front_end.outputs; "
        f"t = load_tokenizer({str(smollm2_gguf)!r}); t.apply_chat_template([{{'role': 'user', 'content': 'x'}}]); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
