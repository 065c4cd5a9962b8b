"""Small models and platforms for configuration tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hardpoint import platforms
from hardpoint.platforms.cpu import CpuPlatform

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def llama_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make a folder with the config files of a small Llama; keywords change config.json, None removes a key."""

    def make(generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        folder = tmp_path / "llama"
        folder.mkdir(exist_ok=True)
        config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


@pytest.fixture
def llama_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Make a small Llama GGUF file; `extra` holds metadata, `tensors` further tensors, `drop` keys to leave out."""

    def make(
        extra: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
        drop: tuple[str, ...] = (),
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "llama.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        values: dict[str, Any] = {
            "block_count": 4,
            "context_length": 512,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 50000.0,
        }
        found = {f"{architecture}.{key}": value for key, value in values.items() if key not in drop}
        for key, value in {**found, **(extra or {})}.items():
            add(writer, key, value)
        embedding = {"token_embd.weight": np.zeros((128, 64), dtype=np.float32)}
        for name, data in {**embedding, **(tensors or {})}.items():
            if name not in drop:
                writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class ProbePlatform(CpuPlatform):
    """A CPU platform that notes its calls and writes what a test tells it to."""

    calls: list[str] = []
    defaults: Callable[[Any], None] = staticmethod(lambda config: None)
    check: Callable[[Any], None] = staticmethod(lambda config: None)

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        cls.calls.append("pre_register_and_update" + ("(parser)" if parser is not None else "()"))

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        cls.calls.append("validate_environ")
        super().validate_environ(hard_fail)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        cls.calls.append("apply_config_platform_defaults")
        cls.defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        cls.calls.append("check_and_update_config")
        cls.check(vllm_config)
        super().check_and_update_config(vllm_config)


@pytest.fixture
def probe() -> Iterator[type[ProbePlatform]]:
    """Make a ProbePlatform the current platform."""
    kind = type("Probe", (ProbePlatform,), {"calls": []})
    platforms.set_current_platform(kind)
    yield kind
    platforms.reset_current_platform()
