"""What model classes use to build their layers and to load their weights."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.config.sections.model import stage_layers
from hardpoint.contracts.model import IntermediateTensors
from hardpoint.worker.distributed.parallel_state import get_pp_group
from hardpoint.worker.layers.parameters import default_weight_loader

WeightsMapping = Mapping[str, str | None]
StackedMapping = Mapping[str, tuple[str, Any]]
V = TypeVar("V")


@dataclass
class WeightsMapper:
    """From the names of a checkpoint to those of a model.

    The maps apply in the order of the fields, each at most once per entry; a None target drops the weight.
    orig_to_new_renaming  whole names      _regex   patterns, `re.sub`    _substr  parts of names
    orig_to_new_stacked   part of a name -> (part of the fused layer's name, shard id)
    orig_to_new_prefix    beginnings       _suffix  endings
    """

    orig_to_new_renaming: WeightsMapping = field(default_factory=dict)
    orig_to_new_regex: Mapping[Any, str | None] = field(default_factory=dict)
    orig_to_new_substr: WeightsMapping = field(default_factory=dict)
    orig_to_new_stacked: StackedMapping = field(default_factory=dict)
    orig_to_new_prefix: WeightsMapping = field(default_factory=dict)
    orig_to_new_suffix: WeightsMapping = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """Both; where they disagree, the right one."""
        names = self.__dataclass_fields__
        return WeightsMapper(**{name: {**getattr(self, name), **getattr(other, name)} for name in names})

    def map_name(self, name: str) -> str | None:
        """The model's name of a weight; None when it is dropped."""
        mapped = self.map_to_shard(name)
        return None if mapped is None else mapped[0]

    def map_to_shard(self, name: str) -> tuple[str, Any] | None:
        """The model's name of a weight and the shard of a fused layer that it is; None when it is dropped."""
        if name in self.orig_to_new_renaming:
            renamed = self.orig_to_new_renaming[name]
            if renamed is None:
                return None
            name = renamed
        for pattern, target in self.orig_to_new_regex.items():
            if re.search(pattern, name):
                if target is None:
                    return None
                name = re.sub(pattern, target, name)
        for part, target in self.orig_to_new_substr.items():
            if part in name:
                if target is None:
                    return None
                name = name.replace(part, target, 1)
        shard = None
        for part, (fused, shard_id) in self.orig_to_new_stacked.items():
            if part in name:
                name, shard = name.replace(part, fused, 1), shard_id
                break
        return self._map_ends(name, shard)

    def _map_ends(self, name: str, shard: Any) -> tuple[str, Any] | None:
        for prefix, target in self.orig_to_new_prefix.items():
            if name.startswith(prefix):
                if target is None:
                    return None
                name = name.replace(prefix, target, 1)
        for suffix, target in self.orig_to_new_suffix.items():
            if name.endswith(suffix):
                if target is None:
                    return None
                name = target.join(name.rsplit(suffix, 1))
        return name, shard

    def apply(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the model's names; a shard's tensor has its id as `loaded_shard_id`."""
        for name, tensor in weights:
            mapped = self.map_to_shard(name)
            if mapped is None:
                continue
            if mapped[1] is not None:
                tensor.loaded_shard_id = mapped[1]  # type: ignore[attr-defined]
            yield mapped[0], tensor

    def apply_list(self, values: list[str]) -> list[str]:
        """The names that are not dropped, mapped."""
        return [mapped for name in values if (mapped := self.map_name(name)) is not None]

    def apply_dict(self, values: dict[str, V]) -> dict[str, V]:
        """The entries whose names are not dropped, under the mapped names."""
        return {mapped: value for name, value in values.items() if (mapped := self.map_name(name)) is not None}


class AutoWeightsLoader:
    """Loads a model's weights by their names.

    A name leads through the modules; one that has its own `load_weights` is given all that is below
    it. A parameter is loaded by its `weight_loader`, else copied. What leads nowhere is a ValueError.

    ignore_unexpected_prefixes, ignore_unexpected_suffixes  names that may lead nowhere
    skip_prefixes, skip_substrs                             names that are passed over
    """

    ROTARY_EMBEDS_UNUSED_WEIGHTS = (
        "rotary_pos_emb.inv_freq",
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
    )

    def __init__(
        self,
        module: nn.Module,
        *,
        skip_prefixes: list[str] | None = None,
        skip_substrs: list[str] | None = None,
        ignore_unexpected_prefixes: list[str] | None = None,
        ignore_unexpected_suffixes: list[str] | None = None,
    ) -> None:
        self.module = module
        self.skip_prefixes = skip_prefixes or []
        self.skip_substrs = [*(skip_substrs or []), *self.ROTARY_EMBEDS_UNUSED_WEIGHTS]
        self.ignore_unexpected_prefixes = ignore_unexpected_prefixes or []
        self.ignore_unexpected_suffixes = ignore_unexpected_suffixes or []

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, mapper: WeightsMapper | None = None
    ) -> set[str]:
        """Load all of `weights`, renamed by `mapper`; returns the names of the parameters loaded."""
        scales = _cache_scale_mapper(self.module)
        if scales is not None:
            mapper = scales if mapper is None else mapper | scales
        if mapper is not None:
            weights = mapper.apply(weights)
        wanted = ((name, tensor) for name, tensor in weights if not self._skips(name))
        return set(self._load_module("", self.module, wanted))

    def _skips(self, name: str) -> bool:
        return name.startswith(tuple(self.skip_prefixes)) or any(part in name for part in self.skip_substrs)

    def _may_be_unexpected(self, name: str) -> bool:
        return name.startswith(tuple(self.ignore_unexpected_prefixes)) or name.endswith(
            tuple(self.ignore_unexpected_suffixes)
        )

    def _load_module(self, base: str, module: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        if isinstance(module, (StageMissingLayer, PPMissingLayer)):
            for _ in weights:
                pass
            return
        own = getattr(module, "load_weights", None)
        if module is not self.module and callable(own):
            loaded = own(weights)
            if loaded is not None:
                yield from (_join(base, name) for name in loaded)
                return
        children = dict(module.named_children())
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        for first, group in _grouped(weights):
            name = _join(base, first)
            if first in children:
                yield from self._load_module(name, children[first], group)
            elif first in parameters or first in buffers:
                yield from self._load_parameter(name, parameters.get(first, buffers.get(first)), group)
            else:
                self._check_unexpected(name, group, module, [*children, *parameters])

    def _load_parameter(self, name: str, parameter: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        for rest, tensor in weights:
            if rest:
                raise ValueError(f"the model has a parameter {name!r}, nothing below it called {rest!r}")
            load_parameter(parameter, tensor, getattr(tensor, "loaded_shard_id", None))
            yield name

    def _check_unexpected(
        self, name: str, weights: Iterable[tuple[str, torch.Tensor]], module: nn.Module, known: list[str]
    ) -> None:
        for rest, _ in weights:
            full = _join(name, rest)
            if not self._may_be_unexpected(full):
                owner = type(module).__name__
                raise ValueError(f"the model has no parameter {full!r}; {owner} has {', '.join(known) or 'none'}")


def _cache_scale_mapper(module: nn.Module) -> WeightsMapper | None:
    quant_config = getattr(module, "quant_config", None)
    return None if quant_config is None else quant_config.get_cache_scale_mapper()


def _join(base: str, name: str) -> str:
    return ".".join(part for part in (base, name) if part)


def _grouped(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, Iterator[tuple[str, torch.Tensor]]]]:
    """Runs of weights with the same first part of the name, each under the rest of it."""
    split = ((*name.partition(".")[::2], tensor) for name, tensor in weights)
    for first, group in itertools.groupby(split, key=lambda entry: entry[0]):
        yield first, ((rest, tensor) for _, rest, tensor in group)


def load_parameter(parameter: Any, tensor: torch.Tensor, shard_id: Any = None) -> None:
    """Load one parameter, or a shard of it, by its own weight loader."""
    loader: Callable[..., None] = getattr(parameter, "weight_loader", default_weight_loader)
    if shard_id is None:
        loader(parameter, tensor)
    else:
        loader(parameter, tensor, shard_id)


def maybe_remap_kv_scale_name(name: str, params_dict: Mapping[str, Any]) -> str | None:
    """The parameter a checkpoint's KV scale belongs to; None when the model keeps no such scale."""
    if not name.endswith((".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")):
        return name
    if name in params_dict:
        return name
    base, _, kind = name.rpartition(".")
    owner = re.sub(r"\.(qkv|k|v|q)_proj$", "", base)
    candidate = f"{owner}.attn.{'k_scale' if kind == 'kv_scale' else kind}"
    return candidate if candidate in params_dict else None


class PPMissingLayer(nn.Identity):
    """Stands where another pipeline stage has a layer; passes its first argument through."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


class StageMissingLayer(nn.Module):
    """Stands where a part of the model is left out on purpose; calling it is an error."""

    def __init__(self, stage_name: str, module: nn.Module | None = None) -> None:
        super().__init__()
        self.stage_name = stage_name
        # Not registered: what is left out has no parameters here.
        self.__dict__["_left_out"] = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise RuntimeError(f"the {self.stage_name} of this model was left out and cannot be called")


def make_layers(
    num_hidden_layers: int, layer_fn: Callable[..., nn.Module], prefix: str
) -> tuple[int, int, nn.ModuleList]:
    """Build this pipeline stage's layers with `layer_fn(prefix="<prefix>.<index>")`.

    Returns the first index, the one past the last, and a list as long as the whole model: layers of
    other stages are PPMissingLayer.
    """
    group = get_pp_group()
    start, end = stage_layers(num_hidden_layers, group.rank_in_group, group.world_size)
    layers = [
        layer_fn(prefix=f"{prefix}.{index}") if start <= index < end else PPMissingLayer()
        for index in range(num_hidden_layers)
    ]
    return start, end, nn.ModuleList(layers)


_missing_paths: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def is_pp_missing_parameter(name: str, model: nn.Module) -> bool:
    """Whether a parameter belongs to a layer of another pipeline stage."""
    missing = _missing_paths.get(model)
    if missing is None:
        absent = (PPMissingLayer, StageMissingLayer)
        missing = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, absent))
        _missing_paths[model] = missing
    return name.startswith(missing)


def maybe_prefix(prefix: str, name: str) -> str:
    """`prefix.name`, or `name` alone when there is no prefix."""
    return f"{prefix}.{name}" if prefix else name


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """The layer's index in a module path; AssertionError unless the path holds exactly one integer.

    num_attn_module  attention modules per layer; above 1, "attn" paths may hold two integers and count on
    """
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    if num_attn_module == 1 or "attn" not in layer_name:
        assert len(numbers) == 1, f"the layer name {layer_name!r} should contain exactly one integer"
        return numbers[0]
    assert len(numbers) <= 2, f"the layer name {layer_name!r} should contain at most two integers"
    return numbers[0] * num_attn_module + numbers[1] if len(numbers) == 2 else numbers[0]


def make_empty_intermediate_tensors_factory(
    keys: list[str], hidden_size: int
) -> Callable[[int, torch.dtype, torch.device], IntermediateTensors]:
    """A `make_empty_intermediate_tensors` for a model whose stages exchange `keys`: [tokens, hidden_size] each."""

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        shape = (batch_size, hidden_size)
        return IntermediateTensors({key: torch.zeros(shape, dtype=dtype, device=device) for key in keys})

    return make


def init_vllm_registered_model(
    vllm_config: VllmConfig, *, prefix: str = "", hf_config: Any = None, architectures: list[str] | None = None
) -> nn.Module:
    """Build a registered model as a part of another, with other facts."""
    from hardpoint.worker.models.building import initialize_model  # noqa: PLC0415 - a model builds a model

    if hf_config is None and architectures is not None:
        hf_config = vllm_config.model_config.hf_config
    if hf_config is not None:
        vllm_config = vllm_config.with_hf_config(hf_config, architectures=architectures)
    return initialize_model(vllm_config=vllm_config, prefix=prefix)
