"""Activation functions, gated and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.contracts.custom_op import CustomOp
from hardpoint.errors import ModelFileError
from hardpoint.worker.distributed.parallel_state import divide, get_tensor_model_parallel_world_size
from hardpoint.worker.kernels import ops
from hardpoint.worker.kernels.floats import Activation
from hardpoint.worker.layers.parameters import set_weight_attrs, sharded_weight_loader


class _Gated(CustomOp):
    """activation(first half) * second half of the last dimension."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)

    @staticmethod
    def _activate(gate: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2d] -> [..., d]."""
        half = x.shape[-1] // 2
        return self._activate(x[..., :half]) * x[..., half:]

    def _kernel(self) -> Activation | None:
        """The kernels' name of what `_activate` does; None when they do not have it."""
        return None

    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        """The same in the CPU kernels, where they apply."""
        kind = self._kernel()
        library = None if kind is None else ops.library_for(self, _NATIVE[kind], x)
        done = None if library is None or kind is None else ops.activate(library, kind, x)
        return self.forward_native(x) if done is None else done

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward_native`."""
        return self.forward_native(x)


@CustomOp.register("silu_and_mul")
class SiluAndMul(_Gated):
    """silu(first half) * second half."""

    @staticmethod
    def _activate(gate: torch.Tensor) -> torch.Tensor:
        return F.silu(gate)

    def _kernel(self) -> Activation | None:
        return Activation.SILU_MUL if type(self)._activate is _SILU else None


@CustomOp.register("gelu_and_mul")
class GeluAndMul(_Gated):
    """gelu(first half) * second half; approximate is "none" or "tanh"."""

    def __init__(self, approximate: str = "none", *, compile_native: bool = True) -> None:
        super().__init__(compile_native=compile_native)
        if approximate not in ("none", "tanh"):
            raise ValueError(f"unknown gelu approximation {approximate!r}; known: none, tanh")
        self.approximate = approximate

    def _activate(self, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.gelu(gate, approximate=self.approximate)

    def _kernel(self) -> Activation | None:
        if type(self)._activate is not _GELU:
            return None
        return Activation.GELU_TANH_MUL if self.approximate == "tanh" else Activation.GELU_MUL


@CustomOp.register("mul_and_silu")
class MulAndSilu(_Gated):
    """first half * silu(second half)."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2d] -> [..., d]."""
        half = x.shape[-1] // 2
        return x[..., :half] * F.silu(x[..., half:])


class _Plain(CustomOp):
    """An elementwise function."""

    @staticmethod
    def _activate(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        """Any shape -> the same shape."""
        return self._activate(x)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward_native`."""
        return self.forward_native(x)


@CustomOp.register("gelu_new")
class NewGELU(_Plain):
    """GPT-2's gelu, by tanh."""

    @staticmethod
    def _activate(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")


@CustomOp.register("gelu_fast")
class FastGELU(_Plain):
    """The same with the constants written out."""

    @staticmethod
    def _activate(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


@CustomOp.register("quick_gelu")
class QuickGELU(_Plain):
    """x * sigmoid(1.702 x)."""

    @staticmethod
    def _activate(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


@CustomOp.register("relu2")
class ReLUSquaredActivation(_Plain):
    """relu(x) squared."""

    @staticmethod
    def _activate(x: torch.Tensor) -> torch.Tensor:
        return torch.square(F.relu(x))


class ScaledActivation(nn.Module):
    """An activation whose result is divided by a loaded scale per element."""

    def __init__(
        self,
        act_module: nn.Module,
        intermediate_size: int,
        input_is_parallel: bool = True,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.act = act_module
        ranks = get_tensor_model_parallel_world_size() if input_is_parallel else 1
        scales = torch.empty(divide(intermediate_size, ranks), dtype=params_dtype or torch.get_default_dtype())
        self.scales = nn.Parameter(scales, requires_grad=False)
        if input_is_parallel:
            set_weight_attrs(self.scales, {"weight_loader": sharded_weight_loader(0)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]."""
        return self.act(x) / self.scales


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_fast": FastGELU,
    "gelu_new": NewGELU,
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "relu2": ReLUSquaredActivation,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "quick_gelu": QuickGELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}

_GATED: dict[str, Callable[..., nn.Module]] = {
    "gelu": GeluAndMul,
    "gelu_pytorch_tanh": lambda **more: GeluAndMul("tanh", **more),
    "silu": SiluAndMul,
    "swish": SiluAndMul,
}


def get_act_fn(act_fn_name: str) -> nn.Module:
    """The activation a model's `hidden_act` names; ModelFileError when there is none of that name."""
    return _named(_ACTIVATIONS, act_fn_name)()


def get_act_and_mul_fn(act_fn_name: str, *, compile_native: bool = True) -> nn.Module:
    """The gated form of the activation a model's `hidden_act` names; ModelFileError when there is none."""
    return _named(_GATED, act_fn_name)(compile_native=compile_native)


def _named(table: dict[str, Callable[..., nn.Module]], name: str) -> Callable[..., nn.Module]:
    found = table.get(name.lower())
    if found is None:
        raise ModelFileError(
            f"the model wants the activation {name!r}, which is not supported",
            code="model-activation",
            fix=f"known are {', '.join(sorted(table))}",
        )
    return found


# As they were written: where a plugin has put others, those compute.
_SILU, _GELU = SiluAndMul._activate, GeluAndMul._activate
_NATIVE = {kind: _Gated.forward_native for kind in (Activation.SILU_MUL, Activation.GELU_MUL, Activation.GELU_TANH_MUL)}
