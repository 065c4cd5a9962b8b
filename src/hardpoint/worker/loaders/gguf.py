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
from hardpoint.worker.loaders.gguf_names import TensorNames, names_of
from hardpoint.worker.loaders.stored import StoredTensor
from hardpoint.worker.quantization.ggml import DECODERS, dequantize


class GGUFModelLoader(BaseModelLoader):
    """`gguf`: models of the architectures of llama.cpp that `config.gguf_facts` knows."""

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
        architecture = str(file.metadata["general.architecture"])
        names = names_of(architecture, with_experts=bool(file.metadata.get(f"{architecture}.expert_count")))
        tensors = _tensors(file, names, model_config.hf_text_config)
        checkpoint = Checkpoint(str(file.path), tensors, names.stored_name)
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


def _tensors(file: GGUFFile, names: TensorNames, facts: Any) -> Iterator[CheckpointTensor]:
    for info in file.tensors.values():
        if info.name in names.skipped:
            continue
        path = str(file.paths[info.part])
        parts = names.model_names(info.name)
        if parts is None:
            raise ModelFileError(
                f"{path}: tensor {info.name!r} belongs to no part of this kind of model", code="model-tensor"
            )
        for name, tensor in _parts(file, info, path, parts, names, facts):
            yield CheckpointTensor(name, tensor, info.name, path)


def _parts(
    file: GGUFFile, info: TensorInfo, path: str, parts: tuple[str, ...], names: TensorNames, facts: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a stored tensor is to the model: itself, its experts, or the layers that it holds one below the other."""
    name = parts[0]
    if "{}" in name:
        for expert, tensor in enumerate(_experts(file, info, path)):
            yield name.format(expert), tensor
        return
    order = _row_order(name, info, path, facts) if names.turned_heads else None
    tensor = _stored(file, info, path, order)
    if names.norm_offset and name.endswith("norm.weight"):
        tensor = tensor.numbers() - names.norm_offset if isinstance(tensor, StoredTensor) else tensor
    if len(parts) == 1:
        yield name, tensor
        return
    start = 0
    for part, rows, shard in zip(parts, _rows_of_parts(len(parts), info, path, facts), "qkv", strict=False):
        piece = tensor[start : start + rows]
        start += rows
        if len(set(parts)) == 1:
            # Fused in the model as well, and loaded part by part.
            piece.loaded_shard_id = shard  # type: ignore[attr-defined]
        yield part, piece


def _rows_of_parts(count: int, info: TensorInfo, path: str, facts: Any) -> list[int]:
    """Rows of each part: of queries, keys and values, or of two halves."""
    if count == 2:
        rows = [info.shape[0] // 2] * 2
    else:
        heads, head = facts.num_attention_heads, getattr(facts, "head_dim", None)
        size = head or facts.hidden_size // heads
        keys = (getattr(facts, "num_key_value_heads", None) or heads) * size
        rows = [heads * size, keys, keys]
    if sum(rows) != info.shape[0]:
        raise ModelFileError(
            f"{path}: tensor {info.name!r} has {info.shape[0]} rows, expected {sum(rows)}", code="model-tensor"
        )
    return rows


def _experts(file: GGUFFile, info: TensorInfo, path: str) -> Iterator[torch.Tensor]:
    if len(info.shape) != 3:
        raise ModelFileError(
            f"{path}: tensor {info.name!r} has {len(info.shape)} dimensions, those of experts have 3",
            code="model-tensor",
        )
    experts, rows, columns = info.shape
    kind = _supported(info, path)
    raw = file.data(info).reshape(experts, rows, -1)
    for expert in range(experts):
        yield StoredTensor(raw[expert], (rows, columns), _decoder(kind), None, (int(kind), *BLOCK_SIZES[kind]))


def _supported(info: TensorInfo, path: str) -> GGMLType:
    kind = info.ggml_type
    if kind not in DECODERS:
        raise ModelFileError(
            f"{path}: tensor {info.name!r} is stored as {kind.name}, which is not supported",
            code="model-tensor-type",
            fix=f"use a file with {', '.join(known.name for known in DECODERS)} tensors only",
        )
    return kind


def _stored(file: GGUFFile, info: TensorInfo, path: str, order: npt.NDArray[np.int64] | None) -> torch.Tensor:
    kind = _supported(info, path)
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
