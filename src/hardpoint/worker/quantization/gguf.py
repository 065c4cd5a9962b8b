"""GGUF's quantisation: weights stay as they are stored and the CPU kernels compute with them.

Where the kernels do not apply, weights are dequantised once, while they are loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.kernels import plain
from hardpoint.worker.kernels.choice import library_for_embedding, library_for_experts, library_for_linear
from hardpoint.worker.kernels.library import Library
from hardpoint.worker.kernels.packed import PackedWeight
from hardpoint.worker.layers.fused_moe import FusedMoE, FusedMoEMethodBase
from hardpoint.worker.layers.fused_moe.method import DOWN, compute_experts
from hardpoint.worker.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from hardpoint.worker.layers.parameters import check_size, part_of, set_weight_attrs
from hardpoint.worker.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding


class GGUFConfig(QuantizationConfig):
    """A GGUF file. Each of its tensors says itself how it is stored, so there are no settings."""

    def get_name(self) -> str:
        """gguf."""
        return "gguf"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Float types."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GGUFConfig:
        """The same for every file."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The kernels where they apply; else plain weights, into which what is loaded is dequantised."""
        if isinstance(layer, LinearBase):
            library = library_for_linear(layer)
            return UnquantizedLinearMethod() if library is None else PackedLinearMethod(library)
        if isinstance(layer, VocabParallelEmbedding):
            library = library_for_embedding(layer)
            return None if library is None else PackedEmbeddingMethod(library)
        if isinstance(layer, FusedMoE):
            library = library_for_experts(layer)
            return None if library is None else PackedExpertsMethod(library)
        return None


@register_weight_loader_v2_supported_method
class PackedLinearMethod(LinearMethodBase):
    """Quantised weights, computed with by the CPU kernels. Activations are rounded to int8 block by block.

    The layer's `weight` is a `PackedWeight`; the parts of a fused layer may be stored in different types.
    """

    def __init__(self, library: Library) -> None:
        self.library = library

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
        """Give the layer `weight`, without numbers yet."""
        rows = sum(output_partition_sizes)
        assert isinstance(layer, LinearBase)
        split = (0, 1) if isinstance(layer, ReplicatedLinear) else (layer.tp_rank, layer.tp_size)
        weight = PackedWeight(self.library, rows, input_size_per_partition, *split)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError when some of the weights were not loaded."""
        layer.weight.packed()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        return _product(layer, x, bias)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """[output, input] float32."""
        return layer.weight.packed().numbers() if type(layer.weight) is PackedWeight else layer.weight


class PackedEmbeddingMethod(QuantizeMethodBase):
    """Quantised token embeddings: rows are dequantised as they are looked up, logits come from the CPU kernels."""

    def __init__(self, library: Library) -> None:
        self.library = library

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
        """Give the layer `weight`: [vocabulary rows on this rank, embedding], without numbers yet."""
        weight = PackedWeight(self.library, sum(output_partition_sizes), input_size_per_partition)
        # The layer's own loader writes into a plain tensor.
        extra_weight_attrs["weight_loader"] = lambda param, loaded: _load_vocabulary(layer, param, loaded)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> nn.Module:
        """Share the packed weights; weights of another kind are computed with as their layer does."""
        if not isinstance(embed_tokens.weight, PackedWeight):
            layer.quant_method = UnquantizedEmbeddingMethod()
        layer.weight = embed_tokens.weight
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """ValueError when some of the weights were not loaded."""
        layer.weight.packed()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., embedding] -> [..., vocabulary rows on this rank]."""
        return _product(layer, x, bias)

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """[...] row numbers -> [..., embedding]."""
        weight = layer.weight
        return weight.packed().look_up(input_) if type(weight) is PackedWeight else F.embedding(input_, weight)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """[vocabulary rows on this rank, embedding] float32."""
        return layer.weight.packed().numbers() if type(layer.weight) is PackedWeight else layer.weight


class PackedExpertsMethod(FusedMoEMethodBase):
    """Quantised experts: two packed matrices each, `w13_experts` (gate above up) and `w2_experts`."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer its matrices, without numbers yet."""
        inner = intermediate_size_per_partition
        for name, shape in (("w13_experts", (2 * inner, hidden_size)), ("w2_experts", (hidden_size, inner))):
            weights = [PackedWeight(self.library, *shape) for _ in range(num_experts)]
            for weight in weights:
                set_weight_attrs(weight, extra_weight_attrs)
            setattr(layer, name, nn.ParameterList(weights))

    def parameter_of(self, layer: Any, part: str, expert: int) -> nn.Parameter:
        """One matrix of one expert."""
        return (layer.w2_experts if part == DOWN else layer.w13_experts)[expert]

    def load_part(self, param: Any, tensor: torch.Tensor, expert: int, first_row: int) -> None:
        """Pack what is stored."""
        param.place(first_row, tensor)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Describe the packed weights to the kernels; ValueError when some were not loaded."""
        layer.packed = [
            (w13.packed(), w2.packed()) for w13, w2 in zip(layer.w13_experts, layer.w2_experts, strict=True)
        ]

    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Expert by expert, over the tokens that chose it."""
        packed = layer.packed
        return compute_experts(
            layer, x, topk_weights, topk_ids,
            lambda expert, rows: packed[expert][0](rows),
            lambda expert, rows: packed[expert][1](rows),
        )  # fmt: skip


def _product(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """With whatever is the layer's weight now: others may have put one of their own there."""
    weight = layer.weight
    return weight.packed()(x, bias) if type(weight) is PackedWeight else plain.linear(x, weight, bias)


def _load_vocabulary(layer: Any, param: PackedWeight, loaded: torch.Tensor) -> None:
    check_size(loaded, 0, layer.org_vocab_size)
    count = layer.shard.end - layer.shard.start
    param.place(0, part_of(loaded, 0, layer.shard.start, count))
    param.place_zeros(count)
