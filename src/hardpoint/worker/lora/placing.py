"""Where an adapter's pairs go: which layer of the model, which part of a fused one, which of it on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hardpoint.errors import ModelFileError
from hardpoint.worker.layers.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    LinearBase,
    Part,
    QKVParallelLinear,
    RowParallelLinear,
)
from hardpoint.worker.layers.parameters import part_of, shard_of
from hardpoint.worker.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from hardpoint.worker.models.loading import PPMissingLayer

LINEAR, LOOK_UP, HEAD = "linear", "look up", "head"
_QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Update:
    """A pair as this rank adds it: `out[:, start : start + outputs] += x @ first.T @ second.T`, scale included.

    first   [rank, this rank's inputs], for a look-up [rows of this rank, rank]
    second  [this rank's outputs, rank]
    """

    first: torch.Tensor
    second: torch.Tensor
    start: int


@dataclass(frozen=True)
class Target:
    """What a module of a checkpoint is in the model.

    name   the layer's name in the model     part   of a fused layer; None = all of it
    kind   LINEAR, LOOK_UP (token embeddings) or HEAD (logits)
    """

    name: str
    layer: Any
    kind: str
    part: Any = None

    @property
    def inputs(self) -> int:
        """Inputs over all ranks; of a look-up, tokens."""
        if self.kind == LINEAR:
            return self.layer.input_size
        return self.layer.org_vocab_size if self.kind == LOOK_UP else self.layer.embedding_dim

    @property
    def outputs(self) -> int:
        """Outputs over all ranks."""
        if self.kind != LINEAR:
            return self.layer.org_vocab_size if self.kind == HEAD else self.layer.embedding_dim
        return sum(part.outputs for part in self._segments())

    def _segments(self) -> list[Part]:
        layer = self.layer
        if isinstance(layer, FusedColumnParallelLinear):
            parts = layer.parts()
            return list(parts.values()) if self.part is None else [parts[self.part]]
        if isinstance(layer, ColumnParallelLinear):
            return [Part(0, layer.output_size_per_partition, layer.output_size, layer.tp_rank)]
        return [Part(0, layer.output_size, layer.output_size, 0)]

    def updates(self, first: torch.Tensor, second: torch.Tensor, scale: float) -> list[Update]:
        """Cut a pair [rank, inputs], [outputs, rank] to this rank."""
        second = second * scale
        if self.kind == LOOK_UP:
            shard = self.layer.shard
            rows = torch.zeros(max(1, shard.end - shard.start), first.shape[0], dtype=first.dtype)
            rows[: shard.end - shard.start] = part_of(first, 1, shard.start, shard.end - shard.start).T
            return [Update(rows, second, 0)]
        if self.kind == HEAD:
            shard = self.layer.shard
            rows = part_of(second, 0, shard.start, shard.end - shard.start)
            return [Update(first, rows, 0)] if len(rows) else []
        if isinstance(self.layer, RowParallelLinear):
            first = shard_of(first, 1, self.layer.input_size_per_partition, self.layer.tp_rank)
        updates, row = [], 0
        for part in self._segments():
            whole = second.narrow(0, row, part.outputs)
            own = whole if part.size == part.outputs else shard_of(whole, 0, part.size, part.rank)
            updates.append(Update(first, own, part.start))
            row += part.outputs
        return updates


class ModelTargets:
    """The layers of a model that can carry adapters, by the names of its checkpoints' modules."""

    def __init__(self, model: nn.Module, allowed: list[str] | None = None) -> None:
        self.packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        self._mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._kinds: dict[str, str] = getattr(model, "embedding_modules", None) or {}
        self._allowed = set(allowed) if allowed else None
        self._elsewhere: list[str] = []
        self._targets: dict[str, Target] = {}
        # A tied output head is the embeddings, and known by both names.
        for name, layer in model.named_modules(remove_duplicate=False):
            if isinstance(layer, PPMissingLayer):
                self._elsewhere.append(name)
            for checkpoint_name, target in self._of_layer(name, layer):
                self._targets.setdefault(checkpoint_name, target)

    def _of_layer(self, name: str, layer: nn.Module) -> Iterator[tuple[str, Target]]:
        if isinstance(layer, VocabParallelEmbedding):
            is_head = self._kinds.get(name.rpartition(".")[2]) == "output_embeddings"
            kind = HEAD if is_head or isinstance(layer, ParallelLMHead) else LOOK_UP
            yield name, Target(name, layer, kind)
        if not isinstance(layer, LinearBase):
            return
        above, dot, last = name.rpartition(".")
        parts = self.packed.get(last, [last])
        if len(parts) == 1:
            yield above + dot + parts[0], Target(name, layer, LINEAR)
            return
        ids = _QKV if isinstance(layer, QKVParallelLinear) else range(len(parts))
        for part, part_id in zip(parts, ids, strict=True):
            yield above + dot + part, Target(name, layer, LINEAR, part_id)

    @property
    def layers(self) -> list[Target]:
        """A target for each name."""
        return list(self._targets.values())

    @property
    def suffixes(self) -> list[str]:
        """Last parts of the names, for messages."""
        return sorted({name.rpartition(".")[2] for name in self._targets})

    def find(self, module: str, adapter: str, origin: str) -> Target | None:
        """The target of a module; None when another pipeline stage has it. ModelFileError when nobody has."""
        last = module.rpartition(".")[2]
        if self._allowed is not None and last not in self._allowed:
            raise ModelFileError(
                f"adapter {adapter!r}: module {module!r} is not among the target modules that are allowed",
                code="lora-target", origin=origin, fix=f"add {last} to --lora-target-modules",
            )  # fmt: skip
        for name in self._names(module):
            if name in self._targets:
                return self._targets[name]
            if any(name == gone or name.startswith(f"{gone}.") for gone in self._elsewhere):
                return None
        raise ModelFileError(
            f"adapter {adapter!r}: the model has no layer {module!r} that can carry an adapter",
            code="lora-target",
            origin=origin,
            fix=f"use an adapter of this model; its layers with these names can: {', '.join(self.suffixes)}",
        )

    def _names(self, module: str) -> list[str]:
        if self._mapper is None:
            return [module]
        mapped = self._mapper.map_name(f"{module}.weight")
        return [module] if mapped is None else [module, mapped.removesuffix(".weight")]
