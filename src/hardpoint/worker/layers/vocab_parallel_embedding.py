"""Token embeddings and the output head, split over tensor-parallel ranks by vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.custom_op import PluggableLayer
from hardpoint.contracts.quantization import QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.distributed.parallel_state import (
    GroupCoordinator,
    divide,
    get_tp_group,
)
from hardpoint.worker.kernels import plain
from hardpoint.worker.layers.parameters import check_size, part_of, set_weight_attrs

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """The next multiple of `pad_to`."""
    return -(-vocab_size // pad_to) * pad_to


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    """Plain weights, for looking rows up and for computing logits."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer `weight`: [vocabulary rows on this rank, embedding]."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0})
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., embedding] -> [..., vocabulary rows on this rank]."""
        return plain.linear(x, layer.weight, bias)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """[...] row numbers -> [..., embedding]."""
        return F.embedding(input_, layer.weight)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """The weight itself."""
        return layer.weight


@dataclass(frozen=True)
class VocabShard:
    """The rows one rank holds: tokens `start` to `end` of the model's own, then those added by adapters.

    rows        rows in the parameter, padding included
    added_start, added_end  the same for added tokens, counted from the first of them
    own_rows    rows given to the model's own tokens, padding included: added tokens begin there
    """

    start: int
    end: int
    added_start: int
    added_end: int
    own_rows: int
    rows: int


def _padding_for(padding: int, ranks: int) -> int:
    """The padding that lets every vocabulary be cut evenly, also by three ranks."""
    return math.lcm(padding, ranks)


def _shard(own: int, added: int, padding: int, rank: int, ranks: int) -> VocabShard:
    own_rows = divide(pad_vocab_size(own, padding), ranks)
    added_rows = divide(pad_vocab_size(added, padding), ranks)
    start, added_start = rank * own_rows, rank * added_rows
    return VocabShard(
        start=min(start, own),
        end=min(start + own_rows, own),
        added_start=min(added_start, added),
        added_end=min(added_start + added_rows, added),
        own_rows=own_rows,
        rows=own_rows + added_rows,
    )


@PluggableLayer.register("vocab_parallel_embedding")
class VocabParallelEmbedding(PluggableLayer):
    """Token embeddings; each rank holds a part of the vocabulary.

    org_num_embeddings  tokens the checkpoint has; the rest are added by adapters
    padding_size        the rows of each part are a multiple of this; padding is zero and never looked up
    reduce_results      sum over the ranks; without it the caller does
    """

    quant_method: QuantizeMethodBase

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
        reduce_results: bool = True,
        quant_method: QuantizeMethodBase | None = None,
        parallel_group: GroupCoordinator | None = None,
    ) -> None:
        super().__init__()
        self.group = parallel_group or get_tp_group()
        self.tp_rank = 0 if disable_tp else self.group.rank_in_group
        self.tp_size = 1 if disable_tp else self.group.world_size
        self.prefix = prefix
        self.reduce_results = reduce_results
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_size = padding_size = _padding_for(padding_size, self.tp_size)
        self.org_vocab_size = org_num_embeddings or num_embeddings
        added = num_embeddings - self.org_vocab_size
        self.org_vocab_size_padded = pad_vocab_size(self.org_vocab_size, padding_size)
        self.num_embeddings_padded = self.org_vocab_size_padded + pad_vocab_size(added, padding_size)
        self.shard = _shard(self.org_vocab_size, added, padding_size, self.tp_rank, self.tp_size)
        self.num_embeddings_per_partition = self.shard.rows
        self.params_dtype = params_dtype or torch.get_default_dtype()
        chosen = quant_method or (quant_config.get_quant_method(self, prefix) if quant_config else None)
        self.quant_method = chosen or UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self,
            embedding_dim,
            [self.shard.rows],
            embedding_dim,
            self.num_embeddings_padded,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows and clear the padding; ValueError when the tensor does not fit."""
        dim = getattr(param, "output_dim", None)
        if dim is None:
            param.data.copy_(loaded_weight)
            return
        check_size(loaded_weight, dim, self.org_vocab_size)
        if loaded_weight.dim() != param.dim() or loaded_weight.shape[1:] != param.shape[1:]:
            raise ValueError(
                f"its shape is {tuple(loaded_weight.shape)}, the model wants {self.embedding_dim} per token"
            )
        count = self.shard.end - self.shard.start
        param.data[:count].copy_(part_of(loaded_weight, dim, self.shard.start, count))
        param.data[count:].zero_()

    def _rows_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of this rank for tokens, and where a token is not here (its row is then 0)."""
        shard = self.shard
        own = (tokens >= shard.start) & (tokens < shard.end)
        added_tokens = tokens - self.org_vocab_size
        added = (added_tokens >= shard.added_start) & (added_tokens < shard.added_end)
        rows = torch.where(own, tokens - shard.start, added_tokens - shard.added_start + shard.own_rows)
        elsewhere = ~(own | added)
        return rows.masked_fill(elsewhere, 0), elsewhere

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """[tokens] ids -> [tokens, embedding]."""
        if self.tp_size == 1 and self.num_embeddings == self.org_vocab_size:
            return self.quant_method.embedding(self, input_)
        rows, elsewhere = self._rows_of(input_)
        output = self.quant_method.embedding(self, rows).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.group.all_reduce(output) if self.reduce_results and self.tp_size > 1 else output

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"tokens={self.num_embeddings}, dim={self.embedding_dim}, tp_size={self.tp_size}"


@PluggableLayer.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """The output head: used through `LogitsProcessor`, never called."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
            disable_tp=disable_tp,
        )
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.shard.rows, dtype=self.params_dtype), requires_grad=False)
            set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": self.weight_loader})
        else:
            self.register_parameter("bias", None)

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> nn.Module:
        """Share the embeddings' weights; returns the layer to use from now on."""
        return self.quant_method.tie_weights(self, embed_tokens)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Refuse: logits come from `LogitsProcessor`."""
        raise RuntimeError(
            "LMHead's weights should be used in the sampler: call LogitsProcessor(lm_head, hidden_states)"
        )
