"""What a layer with adapters computes: as before, then the low-rank part of each row's adapter is added.

A layer keeps its class; its quantisation method is wrapped. So whatever the layer does around it, over ranks too,
holds for both parts, and code that looks for a built-in method (the CPU kernels' programs do) does not find one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hardpoint.contracts.quantization import QuantizeMethodBase
from hardpoint.worker.lora.placing import HEAD, LINEAR, LOOK_UP, Update

# An adapter's id -> the pairs that one layer has of it.
Updates = dict[int, list[Update]]


class Rows(NamedTuple):
    """The rows of a call that belong to one adapter; `at` None = all of them."""

    adapter: int
    at: slice | torch.Tensor | None


class CurrentRows:
    """Shared by all layers of a model: whose rows the call at hand has. `count` rows in all."""

    def __init__(self) -> None:
        self.parts: list[Rows] = []
        self.count = 0


class AdaptedMethod(QuantizeMethodBase):
    """Wraps the method of a linear layer, of embeddings or of an output head.

    base     the layer's own method
    updates  by use of the layer: tied embeddings are looked up and give logits, with an adapter for each
    """

    def __init__(self, base: Any, rows: CurrentRows) -> None:
        self.base, self.rows = base, rows
        self.updates: dict[str, Updates] = {LINEAR: {}, LOOK_UP: {}, HEAD: {}}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """As the layer's own method."""
        self.base.create_weights(layer, *weight_args, **extra_weight_attrs)

    def dequantize_weight(self, layer: Any) -> torch.Tensor:
        """The layer's own weight, without adapters."""
        return self.base.dequantize_weight(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., input] -> [..., output]."""
        out = self.base.apply(layer, x, bias)
        if self.rows.parts:
            self._add(out, x, self.updates[LINEAR])
            self._add(out, x, self.updates[HEAD])
        return out

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        """[...] row numbers -> [..., embedding]."""
        out = self.base.embedding(layer, input_)
        if self.rows.parts:
            self._add(out, input_, self.updates[LOOK_UP], look_up=True)
        return out

    def _add(self, out: torch.Tensor, x: torch.Tensor, updates: Updates, look_up: bool = False) -> None:
        if not updates:
            return
        flat_out = out.view(-1, out.shape[-1])
        flat_x = x.reshape(-1) if look_up else x.reshape(-1, x.shape[-1])
        if len(flat_out) != self.rows.count:
            raise RuntimeError(f"a layer with adapters was given {len(flat_out)} rows in a step of {self.rows.count}")
        for adapter, at in self.rows.parts:
            for update in updates.get(adapter, ()):
                _add_update(flat_out, flat_x, at, update, look_up)


def _add_update(
    out: torch.Tensor, x: torch.Tensor, at: slice | torch.Tensor | None, update: Update, look_up: bool
) -> None:
    own = x if at is None else x[at]
    low = F.embedding(own, update.first) if look_up else F.linear(own.to(update.first.dtype), update.first)
    added = F.linear(low, update.second).to(out.dtype)
    columns = out[:, update.start : update.start + added.shape[-1]]
    if isinstance(at, torch.Tensor):
        columns.index_add_(0, at, added)
    else:
        columns[slice(None) if at is None else at] += added
