"""The adapters of one worker: loaded ones, the layers they are added to, and whose rows a step has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hardpoint.contracts.model import supports_lora
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.worker.batch import RequestState
from hardpoint.worker.lora.methods import AdaptedMethod, CurrentRows, Rows
from hardpoint.worker.lora.placing import HEAD, LOOK_UP, ModelTargets, Target, Update
from hardpoint.worker.lora.reading import AdapterFile, Pair, open_adapter

if TYPE_CHECKING:
    from hardpoint.config.sections import LoRAConfig, VllmConfig

logger = init_logger(__name__)

# Layer name and use -> an adapter's pairs, on this rank.
_Placed = dict[tuple[str, str], list[Update]]


class AdapterManager:
    """Makes a model's layers carry adapters.

    Which adapters are kept is decided by whoever calls `add` and `remove`: the engine core, for all ranks alike.
    """

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        config = vllm_config.lora_config
        assert config is not None
        if not supports_lora(model):
            raise ConfigError(
                f"{type(model).__name__} does not support LoRA adapters", code="lora-model",
                fix="leave --enable-lora out, or serve a model that does",
            )  # fmt: skip
        self._config = config
        self._device = device
        self._dtype = _dtype(config, vllm_config.model_config.dtype)
        self._rows = CurrentRows()
        self._targets = ModelTargets(model, config.target_modules)
        self._methods = self._wrap(model)
        self._loaded: dict[int, LoRARequest] = {}
        # Adapter of each token of the step at hand; 0 = none.
        self._of_tokens = np.zeros(0, np.int64)

    def _wrap(self, model: nn.Module) -> dict[str, tuple[Any, AdaptedMethod]]:
        """Wrap the methods of all layers that can carry adapters; layer name -> layer and method."""
        methods: dict[str, tuple[Any, AdaptedMethod]] = {}
        for target in self._targets.layers:
            method = target.layer.quant_method
            if not isinstance(method, AdaptedMethod):
                method = target.layer.quant_method = AdaptedMethod(method, self._rows)
            methods[target.name] = target.layer, method
        return methods

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Give the layers their own methods back while the block runs: for steps in which nobody has an adapter."""
        for layer, method in self._methods.values():
            layer.quant_method = method.base
        try:
            yield
        finally:
            for layer, method in self._methods.values():
                layer.quant_method = method

    # Adapters.

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter; whether it was not there before. ModelFileError when it cannot be, and nothing changes.

        One that is loaded under this id stays, unless the request says `load_inplace`.
        """
        known = self._loaded.get(request.lora_int_id)
        if known is not None and not request.load_inplace:
            return False
        placed = self._read(request)
        self._drop(request.lora_int_id)
        for (layer, use), updates in placed.items():
            self._methods[layer][1].updates[use][request.lora_int_id] = updates
        self._loaded[request.lora_int_id] = request
        logger.debug("adapter %r is loaded from %s", request.lora_name, request.lora_path)
        return known is None

    def remove(self, adapter: int) -> bool:
        """Drop an adapter; whether it was there."""
        found = self._loaded.pop(adapter, None) is not None
        self._drop(adapter)
        return found

    def ids(self) -> set[int]:
        """Of the loaded adapters."""
        return set(self._loaded)

    def why_unusable(self, request: LoRARequest) -> str:
        """Load an adapter that a step needs and nobody has loaded; why that cannot be, or nothing."""
        if request.lora_int_id in self._loaded:
            return ""
        try:
            self.add(request)
        except HardpointError as error:
            return str(error)
        return ""

    def _drop(self, adapter: int) -> None:
        for _, method in self._methods.values():
            for updates in method.updates.values():
                updates.pop(adapter, None)

    def _read(self, request: LoRARequest) -> _Placed:
        placed: _Placed = {}
        with open_adapter(request.lora_name, request.lora_path, self._config.max_lora_rank) as file:
            origin = str(file.folder)
            found = [(pair, self._targets.find(pair.module, file.name, origin)) for pair in file.pairs]
            for pair, target in found:
                if target is not None:
                    _check(file, pair, target)
            self._check_whole(file)
            for pair, target in found:
                if target is not None:
                    placed.setdefault((target.name, target.kind), []).extend(self._updates(file, pair, target))
        return placed

    def _updates(self, file: AdapterFile, pair: Pair, target: Target) -> list[Update]:
        first, second = file.read(pair.first), file.read(pair.second)
        cut = target.updates(first, second.to(torch.float32), file.settings.scale_of(pair.module))
        return [Update(self._kept(one.first), self._kept(one.second), one.start) for one in cut]

    def _kept(self, half: torch.Tensor) -> torch.Tensor:
        # A copy: what was cut off must not stay in memory, nor the file mapped.
        return half.to(self._device, self._dtype, copy=True).contiguous()

    def _check_whole(self, file: AdapterFile) -> None:
        """Whole weights are only right when they are the model's own, which PEFT writes beside embeddings."""
        for module, stored in file.whole.items():
            target = self._targets.find(module, file.name, str(file.folder))
            if target is None:
                continue
            size = (target.outputs, target.inputs) if target.kind != LOOK_UP else (target.inputs, target.outputs)
            if file.shape(stored) != size or not self._is_own(target, file.read(stored)):
                raise file.bad(
                    f"tensor {stored!r} holds whole weights that are not the model's own",
                    "save the adapter with save_embedding_layers=False", "lora-unsupported",
                )  # fmt: skip

    def _is_own(self, target: Target, weight: torch.Tensor) -> bool:
        if target.kind not in (HEAD, LOOK_UP):
            return False
        shard = target.layer.shard
        own = target.layer.quant_method.dequantize_weight(target.layer)[: shard.end - shard.start]
        return torch.equal(own.cpu(), weight[shard.start : shard.end].to(own.dtype))

    # Steps.

    def begin(self, states: Sequence[RequestState], starts: np.ndarray) -> bool:
        """Note the adapter of each request of a step; whether any has one. One without its adapter ends with a fault.

        starts  [requests + 1] where each request's tokens start
        """
        adapters = np.zeros(len(states), np.int64)
        for number, state in enumerate(states):
            if state.lora_request is not None:
                adapters[number] = state.lora_request.lora_int_id
                state.fault = state.fault or self.why_unusable(state.lora_request)
        self._of_tokens = np.repeat(adapters, np.diff(starts))
        return bool(adapters.any())

    @contextmanager
    def rows(self, tokens: np.ndarray | None = None) -> Iterator[None]:
        """Compute with the adapters of the step's tokens at these places, one per row; None = all tokens."""
        self._rows.parts = _parts(self._of_tokens if tokens is None else self._of_tokens[tokens], self._device)
        self._rows.count = len(self._of_tokens) if tokens is None else len(tokens)
        try:
            yield
        finally:
            self._rows.parts = []


def _parts(of_rows: np.ndarray, device: torch.device) -> list[Rows]:
    parts = []
    for adapter in np.unique(of_rows):
        if not adapter:
            continue
        places = np.flatnonzero(of_rows == adapter)
        first, last = int(places[0]), int(places[-1])
        at: slice | torch.Tensor | None
        if len(places) == len(of_rows):
            at = None
        elif last - first + 1 == len(places):
            at = slice(first, last + 1)
        else:
            at = torch.from_numpy(places).to(device)
        parts.append(Rows(int(adapter), at))
    return parts


def _check(file: AdapterFile, pair: Pair, target: Target) -> None:
    """ModelFileError when a pair does not fit its layer."""
    if pair.embedding != (target.kind == LOOK_UP):
        raise file.bad(f"module {pair.module!r} is {target.kind} in the model", "use an adapter of this model")
    rank = file.settings.rank_of(pair.module)
    for stored, wanted in ((pair.first, (rank, target.inputs)), (pair.second, (target.outputs, rank))):
        if file.shape(stored) != wanted:
            raise file.bad(
                f"tensor {stored!r} has the shape {list(file.shape(stored))}; "
                f"the model and rank {rank} want {list(wanted)}",
                "use an adapter that was trained for this model", "lora-shape",
            )  # fmt: skip


def _dtype(config: LoRAConfig, model_dtype: Any) -> torch.dtype:
    chosen = model_dtype if config.lora_dtype == "auto" else config.lora_dtype
    return getattr(torch, chosen) if isinstance(chosen, str) else chosen


def make_manager(model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> AdapterManager | None:
    """The adapters of a model; None where the configuration has none."""
    return None if vllm_config.lora_config is None else AdapterManager(model, vllm_config, device)


def not_enabled() -> ConfigError:
    """The error for a call about adapters where there are none."""
    return ConfigError("this engine was started without adapters", code="lora-off", fix="start with --enable-lora")
