"""Loads GGUF files: mapped into memory, each tensor decoded straight into its parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hardpoint.config.gguf_file import BLOCK_SIZES, GGMLType, GGUFFile, TensorInfo
from hardpoint.config.model_files import fetch_weights
from hardpoint.config.sections import LoadConfig, ModelConfig
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.worker.loaders.checkpoint import Checkpoint, CheckpointTensor
from hardpoint.worker.loaders.stored import StoredTensor
from hardpoint.worker.quantization.ggml import DECODERS, dequantize

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FROM_BLOCK = {theirs: ours for ours, theirs in _IN_BLOCK.items()}
_FROM_OUTER = {theirs: ours for ours, theirs in _OUTER.items()}

# What the model's config states already.
_NOT_WEIGHTS = ("rope_freqs.weight",)


class GGUFModelLoader(BaseModelLoader):
    """`gguf`: models of llama.cpp's architecture `llama`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        unknown = self.unused_options(set())
        if unknown:
            raise ConfigError(
                f"--model-loader-extra-config: load format 'gguf' knows no {', '.join(unknown)}",
                code="config-load-options",
            )

    def download_model(self, model_config: ModelConfig) -> None:
        """Fetch the file from the hub unless it is here."""
        fetch_weights(model_config, self.load_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill the model from the file."""
        file = GGUFFile.open(fetch_weights(model_config, self.load_config))
        checkpoint = Checkpoint(str(file.path), _tensors(file, model_config.hf_text_config), stored_name)
        with _one_thread():
            checkpoint.fill(model)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Decode on one thread: the pieces are small, and on a busy machine waiting for the others takes far longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model_name(name: str) -> str | None:
    """The Hugging Face name of a tensor of a GGUF file; None when it has none."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _IN_BLOCK:
        return f"model.layers.{int(parts[1])}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _OUTER:
        return f"{_OUTER[parts[0]]}.{parts[1]}"
    return None


def stored_name(name: str) -> str:
    """The name a GGUF file has for a Hugging Face name; the name itself when it has none."""
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    if module in _FROM_OUTER:
        return f"{_FROM_OUTER[module]}.{kind}"
    if len(parts) > 3 and ".".join(parts[3:]) in _FROM_BLOCK:
        return f"blk.{parts[2]}.{_FROM_BLOCK['.'.join(parts[3:])]}.{kind}"
    return name


def _tensors(file: GGUFFile, facts: Any) -> Iterator[CheckpointTensor]:
    for info in file.tensors.values():
        if info.name in _NOT_WEIGHTS:
            continue
        path = str(file.paths[info.part])
        name = model_name(info.name)
        if name is None:
            raise ModelFileError(
                f"{path}: tensor {info.name!r} belongs to no part of this kind of model", code="model-tensor"
            )
        yield CheckpointTensor(name, _stored(file, info, path, _row_order(name, info, path, facts)), info.name, path)


def _stored(file: GGUFFile, info: TensorInfo, path: str, order: npt.NDArray[np.int64] | None) -> torch.Tensor:
    kind = info.ggml_type
    if kind not in DECODERS:
        raise ModelFileError(
            f"{path}: tensor {info.name!r} is stored as {kind.name}, which is not supported",
            code="model-tensor-type",
            fix=f"use a file with {', '.join(known.name for known in DECODERS)} tensors only",
        )
    if len(info.shape) > 2:
        raise ModelFileError(
            f"{path}: tensor {info.name!r} has {len(info.shape)} dimensions, this kind of model has at most 2",
            code="model-tensor",
        )
    if len(info.shape) == 1:
        vector = StoredTensor(file.data(info).reshape(1, -1), info.shape, _decoder(kind))
        return vector if order is None else vector.numbers()[torch.from_numpy(order)]
    block = (int(kind), *BLOCK_SIZES[kind])
    return StoredTensor(file.data(info).reshape(info.shape[0], -1), info.shape, _decoder(kind), order, block)


def _decoder(kind: GGMLType) -> Any:
    return lambda rows: dequantize(rows, kind)


def _row_order(name: str, info: TensorInfo, path: str, facts: Any) -> npt.NDArray[np.int64] | None:
    """Where the rows of a query or key projection lie in the file.

    llama.cpp turns neighbouring elements of a head, Hugging Face's models turn elements half a head
    apart; the converter reorders the rows accordingly, and this is the way back.
    """
    if ".q_proj." in name:
        heads = facts.num_attention_heads
    elif ".k_proj." in name:
        heads = getattr(facts, "num_key_value_heads", None) or facts.num_attention_heads
    else:
        return None
    if getattr(facts, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError(
            f"{path}: heads that are turned in part ('rope.dimension_count') are not supported in GGUF files",
            code="model-rope",
        )
    rows = info.shape[0]
    if rows % (2 * heads):
        raise ModelFileError(
            f"{path}: tensor {info.name!r} has {rows} rows, which are not {heads} heads of an even size",
            code="model-tensor",
        )
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
