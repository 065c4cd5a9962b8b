"""Linear layers, split over tensor-parallel ranks, with a quantisation method each.

Every layer is called as `layer(x) -> (out, bias_or_None)`, or `-> out` with `return_bias=False`.
The bias is handed out instead of added with `skip_bias_add`. Weights are [output, input].
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import nn

from hardpoint.contracts.custom_op import PluggableLayer
from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig, QuantizeMethodBase
from hardpoint.worker.distributed.parallel_state import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    split_tensor_along_last_dim,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from hardpoint.worker.kernels import plain
from hardpoint.worker.layers.parameters import check_size, default_weight_loader, set_weight_attrs, shard_of

# Quantisation methods, by class name, whose parameters bring loaders of their own.
WEIGHT_LOADER_V2_SUPPORTED: list[str] = []

LinearOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


def register_weight_loader_v2_supported_method(cls: type) -> type:
    """Class decorator: the method's parameters load themselves (`load_column_parallel_weight` and so on)."""
    WEIGHT_LOADER_V2_SUPPORTED.append(cls.__name__)
    return cls


class UnquantizedLinearMethod(LinearMethodBase):
    """Plain weights."""

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
        """Give the layer `weight`: [sum of the output parts, input], uninitialised."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0})
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        return plain.linear(x, layer.weight, bias)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """The weight itself."""
        return layer.weight


class LinearBase(PluggableLayer):
    """What the linear layers share: sizes, the quantisation method, the rank and group size."""

    quant_method: QuantizeMethodBase

    def __init__(
        self,
        input_size: int,
        output_size: int,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config = quant_config
        self.prefix = prefix
        self.return_bias = return_bias
        self.disable_tp = disable_tp
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.quant_method = self._choose_method(quant_config, prefix)

    def _choose_method(self, quant_config: QuantizationConfig | None, prefix: str) -> QuantizeMethodBase:
        if quant_config is None:
            return UnquantizedLinearMethod()
        method = quant_config.get_quant_method(self, prefix)
        if method is None:
            raise ValueError(
                f"All linear layers should support quant method. {quant_config.get_name()} has none for {prefix!r}"
            )
        return method

    def _make_bias(self, bias: bool, size: int, weight_loader: Any) -> None:
        if not bias:
            self.register_parameter("bias", None)
            return
        self.bias = nn.Parameter(torch.zeros(size, dtype=self.params_dtype), requires_grad=False)
        set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": weight_loader})

    def _loader_for_method(self) -> Any:
        by_parameter = type(self.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED
        return self.weight_loader_v2 if by_parameter else self.weight_loader

    @abstractmethod
    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's part of a checkpoint's tensor into a parameter; ValueError when it does not fit."""

    @abstractmethod
    def weight_loader_v2(self, param: Any, loaded_weight: torch.Tensor) -> None:
        """The same for parameters that bring loaders of their own."""

    def _apply_with_bias(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.quant_method.apply(self, x, bias)

    def _result(self, output: torch.Tensor) -> LinearOutput:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        """Sizes, for printing the model."""
        return f"in={self.input_size}, out={self.output_size}, bias={self.bias is not None}, tp_size={self.tp_size}"


class Part(NamedTuple):
    """One of several layers that are fused along the output.

    start, size  where this rank's outputs of it stand in the parameter    outputs  those of all ranks
    rank         which of the pieces of `size` outputs this rank has
    """

    start: int
    size: int
    outputs: int
    rank: int


@PluggableLayer.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """A linear layer that every rank computes whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        sizes = getattr(self, "output_sizes", [output_size])
        self.quant_method.create_weights(
            self, input_size, sizes, input_size, output_size, self.params_dtype, weight_loader=self.weight_loader
        )
        self._make_bias(bias, output_size, self.weight_loader)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy a checkpoint's tensor whole."""
        default_weight_loader(param, loaded_weight.reshape(1) if loaded_weight.dim() == 0 else loaded_weight)

    weight_loader_v2 = weight_loader

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """[..., input] -> [..., output]."""
        return self._result(self._apply_with_bias(x, None if self.skip_bias_add else self.bias))


@PluggableLayer.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """A linear layer whose outputs are split over the ranks.

    gather_output  give every rank all outputs instead of its own
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        if not disable_tp:
            self.tp_rank = self.tp_rank if tp_rank is None else tp_rank
            self.tp_size = self.tp_size if tp_size is None else tp_size
        self.gather_output = gather_output
        self.input_size_per_partition = input_size
        self.output_size_per_partition = divide(output_size, self.tp_size)
        self.output_partition_sizes = self._partition_sizes()
        self.quant_method.create_weights(
            self,
            input_size,
            self.output_partition_sizes,
            input_size,
            output_size,
            self.params_dtype,
            weight_loader=self._loader_for_method(),
        )
        self._make_bias(bias, self.output_size_per_partition, self.weight_loader)

    def _partition_sizes(self) -> list[int]:
        return [self.output_size_per_partition]

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's outputs."""
        dim = getattr(param, "output_dim", None)
        if dim is not None:
            check_size(loaded_weight, dim, param.size(dim) * self.tp_size)
            loaded_weight = shard_of(loaded_weight, dim, param.size(dim), self.tp_rank)
        default_weight_loader(param, loaded_weight)

    def weight_loader_v2(self, param: Any, loaded_weight: torch.Tensor) -> None:
        """Let the parameter take this rank's outputs."""
        param.load_column_parallel_weight(loaded_weight=loaded_weight)

    def forward(self, x: torch.Tensor) -> LinearOutput:
        """[..., input] -> [..., this rank's outputs], or all of them with `gather_output`."""
        output = self._apply_with_bias(x, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            output = tensor_model_parallel_all_gather(output)
        return self._result(output)


class FusedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers over the same input, fused along the output.

    A part is loaded by its id (`loaded_shard_id`); several at once, or all of them when the checkpoint
    holds them fused, by a tuple of ids or None.
    """

    @abstractmethod
    def parts(self) -> dict[Any, Part]:
        """Id -> part, in the order in which they are fused."""

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """Copy this rank's outputs of one part, several parts or all parts."""
        dim = getattr(param, "output_dim", None)
        if dim is None:
            default_weight_loader(param, loaded_weight)
            return
        parts = self.parts()
        ids = loaded_shard_id if isinstance(loaded_shard_id, tuple) else (loaded_shard_id,)
        loaded = list(parts.values()) if loaded_shard_id is None else [parts[part] for part in ids]
        check_size(loaded_weight, dim, sum(part.outputs for part in loaded))
        first = 0
        for part in loaded:
            target = param.data.narrow(dim, part.start, part.size)
            own = loaded_weight.narrow(dim, first, part.outputs)
            default_weight_loader(target, shard_of(own, dim, part.size, part.rank))
            first += part.outputs

    def _one_part(self, loaded_shard_id: Any) -> Part:
        if loaded_shard_id is None or isinstance(loaded_shard_id, tuple):
            raise ValueError("parts of a quantised layer are loaded one by one")
        return self.parts()[loaded_shard_id]


class MergedColumnParallelLinear(FusedColumnParallelLinear):
    """Layers fused along the output, whose parts are loaded by index."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        self.output_sizes = list(output_sizes)
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _partition_sizes(self) -> list[int]:
        return [divide(size, self.tp_size) for size in self.output_sizes]

    def parts(self) -> dict[Any, Part]:
        """Id -> part, in the order in which they are fused."""
        sizes = self.output_partition_sizes
        return {
            part: Part(sum(sizes[:part]), size, outputs, self.tp_rank)
            for part, (size, outputs) in enumerate(zip(sizes, self.output_sizes, strict=True))
        }

    def weight_loader_v2(
        self, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: int | tuple[int, ...] | None = None
    ) -> None:
        """Let the parameter take this rank's outputs of one part."""
        part = self._one_part(loaded_shard_id)
        param.load_merged_column_weight(
            loaded_weight=loaded_weight,
            shard_id=loaded_shard_id,
            shard_offset=part.start,
            shard_size=part.size,
            tp_rank=self.tp_rank,
        )


class QKVParallelLinear(FusedColumnParallelLinear):
    """The query, key and value projections of attention, fused and split over the ranks by head.

    With more ranks than key/value heads each of these heads is held by several ranks. Parts are
    loaded by `loaded_shard_id` "q", "k" and "v"; None for a checkpoint that holds them fused.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        ranks = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = head_size if v_head_size is None else v_head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.num_heads = divide(total_num_heads, ranks)
        if ranks >= self.total_num_kv_heads:
            self.num_kv_heads, self.num_kv_head_replicas = 1, divide(ranks, self.total_num_kv_heads)
        else:
            self.num_kv_heads, self.num_kv_head_replicas = divide(self.total_num_kv_heads, ranks), 1
        self.q_proj_shard_size = self.num_heads * head_size
        self.kv_proj_shard_size = self.num_kv_heads * head_size
        self.v_proj_shard_size = self.num_kv_heads * self.v_head_size
        self.output_sizes = [size * ranks for size in self._partition_sizes()]
        super().__init__(
            hidden_size,
            sum(self.output_sizes),
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _partition_sizes(self) -> list[int]:
        return [self.q_proj_shard_size, self.kv_proj_shard_size, self.v_proj_shard_size]

    def parts(self) -> dict[Any, Part]:
        """Id -> part, in the order in which they are fused."""
        q, k, v = self.output_partition_sizes
        kv_rank = self.tp_rank // self.num_kv_head_replicas
        return {
            "q": Part(0, q, self.total_num_heads * self.head_size, self.tp_rank),
            "k": Part(q, k, self.total_num_kv_heads * self.head_size, kv_rank),
            "v": Part(q + k, v, self.total_num_kv_heads * self.v_head_size, kv_rank),
        }

    def weight_loader_v2(self, param: Any, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None) -> None:
        """Let the parameter take this rank's heads of one part."""
        part = self._one_part(loaded_shard_id)
        param.load_qkv_weight(
            loaded_weight=loaded_weight,
            num_heads=self.num_kv_head_replicas,
            shard_id=loaded_shard_id,
            shard_offset=part.start,
            shard_size=part.size,
            tp_rank=self.tp_rank,
        )


@PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """A linear layer whose inputs are split over the ranks; the ranks' results are summed.

    input_is_parallel  each rank is given its own inputs only
    reduce_results     sum over the ranks; without it the caller does
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        if bias and not reduce_results and not skip_bias_add:
            raise ValueError("without reduce_results every rank would add the bias; set skip_bias_add")
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self.input_size_per_partition = divide(input_size, self.tp_size)
        self.output_size_per_partition = output_size
        self.output_partition_sizes = [output_size]
        self.quant_method.create_weights(
            self,
            self.input_size_per_partition,
            self.output_partition_sizes,
            input_size,
            output_size,
            self.params_dtype,
            weight_loader=self._loader_for_method(),
        )
        self._make_bias(bias, output_size, self.weight_loader)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's inputs."""
        dim = getattr(param, "input_dim", None)
        if dim is not None:
            check_size(loaded_weight, dim, param.size(dim) * self.tp_size)
            loaded_weight = shard_of(loaded_weight, dim, param.size(dim), self.tp_rank)
        default_weight_loader(param, loaded_weight)

    def weight_loader_v2(self, param: Any, loaded_weight: torch.Tensor) -> None:
        """Let the parameter take this rank's inputs."""
        param.load_row_parallel_weight(loaded_weight=loaded_weight)

    def forward(self, input_: torch.Tensor) -> LinearOutput:
        """[..., this rank's inputs] -> [..., output]."""
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        # One rank adds the bias; the sum over ranks then holds it once.
        adds_bias = self.tp_rank == 0 and not self.skip_bias_add
        output = self._apply_with_bias(input_, self.bias if adds_bias else None)
        if self.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return self._result(output)
