"""Records what a model computes, once, as a list of the kernels' operations.

The model's own `forward` runs with stand-ins for tensors. Built-in layers, when they are given stand-ins, note an
operation instead of computing; the code between them may cut a stand-in into heads and parts, scale it and add two.
Whatever else meets a stand-in ends the recording (`CannotRecord`), and the model then computes layer by layer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hardpoint.worker.attention.cpu import CPUAttentionImpl
from hardpoint.worker.kernels.floats import Activation, Kind, NormFacts, Op, RotaryFacts
from hardpoint.worker.kernels.packed import PackedWeight
from hardpoint.worker.kernels.plain import PlainLinear
from hardpoint.worker.layers import activation, attention, layernorm, linear, rotary_embedding, vocab_parallel_embedding
from hardpoint.worker.quantization.gguf import PackedEmbeddingMethod, PackedLinearMethod

# The quantisation methods whose products the kernels compute.
BUILT_IN_METHODS = (
    PackedLinearMethod,
    PackedEmbeddingMethod,
    linear.UnquantizedLinearMethod,
    vocab_parallel_embedding.UnquantizedEmbeddingMethod,
)
# Stands for the number of tokens in a stand-in's shape; no real size is this one.
TOKENS = 1_000_003


class CannotRecord(Exception):
    """Why a model has no program."""


class _Buffer:
    """Room for `panel` rows, which goes back to the recorder when no stand-in has it any more."""

    def __init__(self, recorder: Recorder, width: int, memory: torch.Tensor) -> None:
        self.width, self.memory = width, memory
        self._recorder = recorder
        # First column of a part -> how often the part was overwritten.
        self.versions: dict[int, int] = {}

    def __del__(self) -> None:
        self._recorder.free.setdefault(self.width, []).append(self.memory)


class Value:
    """Stands for a float32 tensor of a step: some columns of a buffer, perhaps seen as heads."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, buffer: _Buffer, column: int, width: int, heads: int = 0) -> None:
        self.buffer, self.column, self.width, self.heads = buffer, column, width, heads
        self._version = buffer.versions.get(column, 0)

    @property
    def shape(self) -> torch.Size:
        """As of the tensor it stands for."""
        tail = (self.heads, self.width // self.heads) if self.heads else (self.width,)
        return torch.Size((TOKENS, *tail))

    @property
    def place(self) -> int:
        """Address of the first number; CannotRecord when it was overwritten since."""
        if self.buffer.versions.get(self.column, 0) != self._version:
            raise CannotRecord("a tensor is used after it was overwritten")
        return self.buffer.memory.data_ptr() + 4 * self.column

    @property
    def stride(self) -> int:
        """Floats from token to token."""
        return self.buffer.width

    def overwritten(self) -> Value:
        """The same place with new numbers."""
        self.buffer.versions[self.column] = self.buffer.versions.get(self.column, 0) + 1
        return Value(self.buffer, self.column, self.width, self.heads)

    def split(self, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
        """Cut into parts along the last dimension."""
        if dim != -1 or self.heads or isinstance(sizes, int) or sum(sizes) != self.width:
            raise CannotRecord("a split that is not into columns")
        self.place  # noqa: B018 - checks that it is still there
        starts = [self.column + sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(Value(self.buffer, start, size) for start, size in zip(starts, sizes, strict=True))

    def view(self, *shape: Any) -> Value:
        """See as heads, or as one row again."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[0] not in (-1, TOKENS) or -1 in sizes[1:] or math.prod(sizes[1:]) != self.width:
            raise CannotRecord(f"a view as {sizes}")
        if len(sizes) > 3:
            raise CannotRecord(f"a view as {sizes}")
        self.place  # noqa: B018 - checks that it is still there
        return Value(self.buffer, self.column, self.width, sizes[1] if len(sizes) == 3 else 0)

    reshape = view

    def __mul__(self, factor: Any) -> Value:
        return self.buffer._recorder.scaled(self, factor)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Value:
        return self.buffer._recorder.added(self, other)

    def __getattr__(self, name: str) -> Any:
        raise CannotRecord(f"the model asks a tensor for {name!r}")

    def __bool__(self) -> bool:
        raise CannotRecord("the model looks at numbers")


class _Marker:
    """Stands for the token ids or the positions, which only layers read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise CannotRecord(f"the model asks the {self._name} for {name!r}")


class Recorder:
    """Collects operations. `kept` holds what they point to."""

    def __init__(self, panel: int, max_position: int) -> None:
        self.panel, self.max_position = panel, max_position
        self.ops: list[Op] = []
        self.kept: list[Any] = []
        self.free: dict[int, list[torch.Tensor]] = {}
        self.ids, self.positions = _Marker("token ids"), _Marker("positions")
        # Attention layers in the order they are called, by number of their operation.
        self.attention: list[tuple[int, attention.Attention]] = []

    # Places.

    def new(self, width: int) -> Value:
        """Room for a result."""
        waiting = self.free.get(width)
        memory = waiting.pop() if waiting else torch.empty((self.panel, width), dtype=torch.float32)
        if not any(memory is kept for kept in self.kept):
            self.kept.append(memory)
        return Value(_Buffer(self, width, memory), 0, width)

    def keep(self, thing: Any) -> int:
        """Keep a structure; returns its address."""
        self.kept.append(thing)
        return ctypes.addressof(thing)

    def numbers(self, tensor: torch.Tensor | None, size: int) -> int | None:
        """Address of a parameter that is float32 and lies in one piece."""
        if tensor is None:
            return None
        if tensor.dtype is not torch.float32 or not tensor.is_contiguous() or tensor.numel() != size:
            raise CannotRecord("a parameter that is not float32")
        self.kept.append(tensor)
        return tensor.data_ptr()

    def add(self, kind: Kind, **fields: Any) -> None:
        """Note an operation."""
        self.ops.append(Op(kind=int(kind), **fields))

    # Between layers.

    def scaled(self, x: Value, factor: Any) -> Value:
        """factor * x."""
        if isinstance(factor, torch.Tensor) and type(factor) is torch.Tensor and factor.numel() == 1:
            factor = factor.item()
        if not isinstance(factor, int | float):
            raise CannotRecord("a product of two tensors")
        out = self.new(x.width)
        self.add(
            Kind.SCALE, in_=x.place, in_stride=x.stride, out=out.place, out_stride=out.stride, size=x.width,
            factor=float(factor),
        )  # fmt: skip
        return Value(out.buffer, 0, x.width, x.heads)

    def added(self, a: Value, b: Any) -> Value:
        """a + b."""
        if not isinstance(b, Value) or a.shape != b.shape:
            raise CannotRecord("a sum with something else than a tensor of the same shape")
        out = self.new(a.width)
        self.add(
            Kind.ADD, in_=a.place, in_stride=a.stride, second=b.place, second_stride=b.stride, out=out.place,
            out_stride=out.stride, size=a.width, factor=1.0,
        )  # fmt: skip
        return Value(out.buffer, 0, a.width, a.heads)

    # Layers.

    def layer(self, module: nn.Module) -> Callable[..., Any] | None:
        """What notes a built-in layer; None for a module that is made of others."""
        noters = {**_NOTERS, **dict.fromkeys(_ROTARY, Recorder.rotate)}
        noter = noters.get(type(module))
        return None if noter is None else lambda *args, **kwargs: noter(self, module, *args, **kwargs)

    def linear(self, layer: Any, x: Value) -> Any:
        """A linear layer whose weights the kernels read."""
        packed = _weights(layer)
        if packed is None or layer.tp_size != 1 or layer.skip_bias_add or getattr(layer, "gather_output", False):
            raise CannotRecord(f"{layer.prefix}: its weights are not the kernels', or it meets other ranks")
        if x.width != packed.columns or x.heads:
            raise CannotRecord(f"{layer.prefix}: its input has another width")
        out = self.new(packed.outputs)
        self.kept.append(packed)
        self.add(
            Kind.LINEAR, what=packed.place, in_=x.place, in_stride=x.stride, out=out.place, out_stride=out.stride,
            bias=self.numbers(layer.bias, packed.outputs),
        )  # fmt: skip
        return (out, None) if layer.return_bias else out

    def embed(self, layer: Any, ids: Any) -> Value:
        """The embeddings of the step's token ids."""
        packed = _weights(layer)
        if ids is not self.ids or packed is None or layer.tp_size != 1 or layer.num_embeddings != layer.org_vocab_size:
            raise CannotRecord("embeddings that are not the kernels'")
        out = self.new(packed.columns)
        self.kept.append(packed)
        self.add(Kind.EMBED, what=packed.place, out=out.place, out_stride=out.stride, factor=1.0)
        return out

    def norm(self, layer: Any, x: Value, residual: Value | None = None) -> Any:
        """A norm of whole rows, or of each head."""
        size, gemma = layer.hidden_size, type(layer) is layernorm.GemmaRMSNorm
        if not gemma and layer.variance_size_override is not None:
            raise CannotRecord("a norm by part of its input")
        facts = NormFacts(self.numbers(layer.weight, size), 1.0 if gemma else 0.0, layer.variance_epsilon, size)
        if x.width != size * (x.heads or 1) or (residual is not None and (x.heads or residual.shape != x.shape)):
            raise CannotRecord("a norm of another width")
        out = self.new(x.width)
        fields: dict[str, Any] = {"what": self.keep(facts), "in_": x.place, "in_stride": x.stride, "size": size}
        if residual is not None:
            fields |= {"second": residual.place, "second_stride": residual.stride}
        self.add(Kind.NORM, number=x.heads, out=out.place, out_stride=out.stride, **fields)
        normed = Value(out.buffer, 0, x.width, x.heads)
        return normed if residual is None else (normed, residual.overwritten())

    def layer_norm(self, layer: Any, x: Value) -> Value:
        """A norm with mean and bias."""
        if x.width != layer.dim:
            raise CannotRecord("a norm of another width")
        facts = NormFacts(self.numbers(layer.weight, layer.dim), 0.0, layer.eps, layer.dim)
        out = self.new(x.width)
        self.add(
            Kind.LAYER_NORM, what=self.keep(facts), in_=x.place, in_stride=x.stride, out=out.place,
            out_stride=out.stride, bias=self.numbers(layer.bias, layer.dim), size=layer.dim,
        )  # fmt: skip
        return out

    def rotate(self, layer: Any, positions: Any, query: Value, key: Value | None = None) -> Any:
        """Rotary positions, in place."""
        table = layer.cos_sin_cache
        if positions is not self.positions or table.shape[0] < self.max_position:
            raise CannotRecord("rotary positions other than the step's")
        if query.width % layer.head_size or (key is not None and key.width % layer.head_size):
            raise CannotRecord("heads of another size than the rotary layer's")
        facts = RotaryFacts(
            self.numbers(table, table.numel()), layer.rotary_dim, layer.head_size, bool(layer.is_neox_style)
        )
        keys: dict[str, Any] = {}
        if key is not None:
            keys = {"second": key.place, "second_stride": key.stride, "size": key.width // layer.head_size}
        self.add(
            Kind.ROTATE, number=query.width // layer.head_size, what=self.keep(facts), in_=query.place,
            in_stride=query.stride, **keys,
        )  # fmt: skip
        return query.overwritten(), None if key is None else key.overwritten()

    def attend(self, layer: Any, query: Value, key: Value | None, value: Value | None) -> Value:
        """Attention over the paged cache."""
        impl = layer.impl
        if type(impl) is not CPUAttentionImpl or impl.library is None or layer.head_size_v != layer.head_size:
            raise CannotRecord(f"{layer.layer_name}: its attention is not the kernels'")
        if layer.kv_cache.numel() == 0:
            raise CannotRecord(f"{layer.layer_name}: it has no cache yet")
        if query.width != layer.num_heads * layer.head_size:
            raise CannotRecord(f"{layer.layer_name}: queries of another width")
        facts = impl.facts(layer.kv_cache)
        self.kept += [facts, layer.kv_cache]
        out = self.new(query.width)
        keys: dict[str, Any] = {}
        if key is not None and value is not None and not impl.shares_cache:
            keys = {
                "second": key.place, "second_stride": key.stride, "third": value.place, "third_stride": value.stride,
            }  # fmt: skip
        self.attention.append((len(self.ops), layer))
        self.add(
            Kind.ATTEND, what=ctypes.addressof(facts), in_=query.place, in_stride=query.stride, out=out.place,
            out_stride=out.stride, **keys,
        )  # fmt: skip
        return out

    def activate(self, layer: Any, x: Value) -> Value:
        """A gated activation."""
        kind = _ACTIVATIONS[type(layer)]
        if kind is Activation.GELU_MUL and layer.approximate == "tanh":
            kind = Activation.GELU_TANH_MUL
        out = self.new(x.width // 2)
        self.add(
            Kind.ACTIVATE, number=int(kind), in_=x.place, in_stride=x.stride, out=out.place, out_stride=out.stride,
            size=x.width // 2,
        )  # fmt: skip
        return out


def _weights(layer: Any) -> Any:
    """The weights as the kernels read them; None for weights of another kind."""
    method, weight = layer.quant_method, layer.weight
    if type(method) not in BUILT_IN_METHODS or vars(method).keys() - {"library"}:
        return None
    if type(weight) is PackedWeight:
        return weight.packed()
    try:
        return PlainLinear(weight)
    except ValueError:
        return None


_ACTIVATIONS = {
    activation.SiluAndMul: Activation.SILU_MUL,
    activation.GeluAndMul: Activation.GELU_MUL,
    activation.MulAndSilu: Activation.MUL_SILU,
}
_ROTARY = tuple(
    cls
    for cls in vars(rotary_embedding).values()
    if isinstance(cls, type)
    and issubclass(cls, rotary_embedding.RotaryEmbeddingBase)
    and cls.forward_native is rotary_embedding.RotaryEmbeddingBase.forward_native
)
_NOTERS: dict[type, Callable[..., Any]] = {
    linear.ReplicatedLinear: Recorder.linear,
    linear.ColumnParallelLinear: Recorder.linear,
    linear.MergedColumnParallelLinear: Recorder.linear,
    linear.QKVParallelLinear: Recorder.linear,
    linear.RowParallelLinear: Recorder.linear,
    vocab_parallel_embedding.VocabParallelEmbedding: Recorder.embed,
    layernorm.RMSNorm: Recorder.norm,
    layernorm.GemmaRMSNorm: Recorder.norm,
    layernorm.LayerNorm: Recorder.layer_norm,
    attention.Attention: Recorder.attend,
    **dict.fromkeys(_ACTIVATIONS, Recorder.activate),
}


@contextmanager
def noting(recorder: Recorder, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have the built-in layers among `modules` note instead of compute."""
    changed = []
    try:
        for module in modules:
            noter = recorder.layer(module)
            if noter is not None:
                module.__dict__["forward"] = noter
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.__dict__["forward"]
