"""Any causal model of the package transformers, run by its own code but through our attention and KV cache.

The model is built as transformers has it. Its attention function is ours: it looks up the `Attention` layer that
belongs to the calling module. What those layers must be like - heads, sizes, scale, window - is found by running the
model once on one token and noting what its attention modules ask for. With tensor parallelism the linear layers that
the model's own plan names are split.
"""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import IntermediateTensors
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.extensions.faults import in_words
from hardpoint.worker.distributed.parallel_state import get_tensor_model_parallel_world_size
from hardpoint.worker.layers.attention import Attention
from hardpoint.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from hardpoint.worker.models.loading import AutoWeightsLoader, load_parameter, maybe_prefix

_NAME = "hardpoint"
_INSTALL = "pip install 'hardpoint[transformers]'"
_EXPERT = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
# Ways of splitting a layer -> its class here and what that class is told.
_SPLITS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "colwise": (ColumnParallelLinear, {}),
    "rowwise": (RowParallelLinear, {}),
    "colwise_gather_output": (ColumnParallelLinear, {"gather_output": True}),
    "colwise_rep": (ColumnParallelLinear, {"gather_output": True}),
    "rowwise_split_input": (RowParallelLinear, {"input_is_parallel": False}),
    "rowwise_rep": (RowParallelLinear, {"input_is_parallel": False}),
}

# Attention module of a model -> our layer.
_layers: WeakKeyDictionary[nn.Module, Attention] = WeakKeyDictionary()
# Where a model is being tried: what its attention modules were called with, in order.
_noted: list[tuple[nn.Module, dict[str, Any]]] | None = None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, tokens, head size], keys and values alike -> [1, tokens, ...]."""
    if _noted is not None:
        facts = {"heads": query.shape[1], "kv_heads": key.shape[1], "size": query.shape[3], "size_v": value.shape[3]}
        _noted.append((module, {**settings, **facts}))
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None
    flat = (tensor.transpose(1, 2).reshape(tensor.shape[2], -1) for tensor in (query, key, value))
    output = _layers[module](*flat)
    return output.view(1, query.shape[2], query.shape[1], value.shape[3]), None


class _HiddenStates:
    """Looks like the output of the part of a model below its head."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getattr__(self, name: str) -> None:
        # What a head may pass on besides: caches, attention weights and the like.
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _Given(nn.Module):
    """Stands in for the part of a model below its head: gives back the hidden states it is given."""

    @property
    def decoder(self) -> _Given:
        """Some heads call what is inside."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _HiddenStates:
        """As the output of a model of transformers."""
        return _HiddenStates(inputs_embeds)


class TransformersForCausalLM(nn.Module):
    """A model of transformers."""

    packed_modules_mapping: dict[str, list[str]] = {}
    embedding_modules: dict[str, str] = {}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        if vllm_config.quant_config is not None:
            raise ConfigError("quantised models cannot be run by transformers here", code="model-impl")
        self.causal = _build(vllm_config)
        if get_tensor_model_parallel_world_size() > 1:
            _split(self.causal)
        self.__dict__["_head"] = self._make_head()
        self.attention_layers = nn.ModuleList(_make_attention(self.causal, vllm_config, self._try(), prefix))

    def _make_head(self) -> Any:
        """The same model without what is below its head, whose parameters and ways with logits it shares."""
        head = copy.copy(self.causal)
        head.__dict__["_modules"] = {
            **self.causal._modules,
            self.causal.base_model_prefix: _Given(),
        }
        return head

    @torch.no_grad()
    def _try(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Compute one token; what each attention module was called with."""
        one = torch.zeros(1, dtype=torch.long)
        try:
            with _noting() as noted:
                hidden = self(one, one)
            self.compute_logits(hidden)
        except Exception as error:
            if _is_without_memory(self.causal):
                raise NotImplementedError(f"the model cannot be tried on meta tensors: {error}") from error
            raise ConfigError(
                f"transformers' {type(self.causal).__name__} cannot be run here: {in_words(error)}", code="model-impl"
            ) from error
        return noted

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.causal.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        given = {"input_ids": input_ids[None]} if inputs_embeds is None else {"inputs_embeds": inputs_embeds[None]}  # type: ignore[index]
        found = self.causal.base_model(**given, position_ids=positions[None], use_cache=False, return_dict=True)
        return found.last_hidden_state[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        head: Any = self.__dict__["_head"]
        return head(inputs_embeds=hidden_states[None], use_cache=False, return_dict=True).logits[0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        named = dict(self.causal.named_parameters(remove_duplicate=False))
        named.update(self.causal.named_buffers())
        loaded: set[str] = set()
        parts: dict[str, set[tuple[int, str]]] = {}
        rename = _renaming(self.causal)
        for stored, tensor in weights:
            name = rename(stored)
            target = self._target(name, named)
            if target is not None:
                load_parameter(named[target], tensor)
                loaded.add(target)
            elif not self._load_expert(name, tensor, named, parts):
                if name.endswith(AutoWeightsLoader.ROTARY_EMBEDS_UNUSED_WEIGHTS) or self._is_tied_head(name):
                    continue
                raise ValueError(f"the model has no parameter {name!r}")
        loaded |= {name for name, found in parts.items() if _is_whole(name, named[name], found)}
        shared = {id(named[name]) for name in loaded}
        return {f"causal.{name}" for name, parameter in named.items() if id(parameter) in shared}

    def _target(self, name: str, named: dict[str, Any]) -> str | None:
        prefix = self.causal.base_model_prefix
        candidates = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        return next((candidate for candidate in candidates if candidate in named), None)

    def _is_tied_head(self, name: str) -> bool:
        return name == "lm_head.weight" and bool(getattr(self.config, "tie_word_embeddings", False))

    def _load_expert(
        self, name: str, tensor: torch.Tensor, named: dict[str, Any], parts: dict[str, set[tuple[int, str]]]
    ) -> bool:
        """Load one expert's matrix into the parameter that holds those of all; False for other names."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return False
        part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(found["part"], found["part"])
        experts = found["experts"]
        # A layer that transformers has renamed keeps its place.
        layer = experts.rsplit(".", 2)[0]
        fused = "down_proj" if part == "down_proj" else "gate_up_proj"
        target = next((key for key in named if key.startswith(f"{layer}.") and key.endswith(f".experts.{fused}")), None)
        if target is None or int(found["number"]) >= named[target].shape[0]:
            return False
        place = named[target].data[int(found["number"])]
        if part != "down_proj":
            place = place.chunk(2, dim=0)[part == "up_proj"]
        if place.shape != tensor.shape:
            raise ValueError(f"its shape is {tuple(tensor.shape)}, the model has {tuple(place.shape)}")
        place.copy_(tensor)
        parts.setdefault(target, set()).add((int(found["number"]), part))
        return True


def _renaming(model: Any) -> Callable[[str], str]:
    """How transformers renames what older checkpoints call otherwise; nothing for versions that do not."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - optional package
        from transformers.core_model_loading import WeightRenaming, rename_source_key  # noqa: PLC0415 - the same
    except ImportError:
        return str
    known = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return lambda name: rename_source_key(name, known, [])[0]


def _is_whole(name: str, parameter: torch.Tensor, parts: set[tuple[int, str]]) -> bool:
    """Whether every matrix of every expert has been loaded."""
    return len(parts) == parameter.shape[0] * (1 if name.endswith("down_proj") else 2)


def _build(vllm_config: VllmConfig) -> Any:
    """The model as transformers builds it, without numbers in it yet."""
    try:
        import transformers  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise ConfigError(
            f"the package transformers, which is to run this model, cannot be imported: {error}",
            code="model-impl",
            fix=_INSTALL,
        ) from error
    model_config = vllm_config.model_config
    config = transformers.AutoConfig.from_pretrained(model_config.local_path, trust_remote_code=False)
    if isinstance(model_config.hf_overrides, dict):
        changes = {key: value for key, value in model_config.hf_overrides.items() if key != "architectures"}
        config.update(changes)
    transformers.AttentionInterface.register(_NAME, _attend)
    with _uninitialised():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.get_default_dtype(), attn_implementation=_NAME, trust_remote_code=False
        )
    if not getattr(type(model), "_supports_attention_backend", False):
        raise ConfigError(
            f"transformers' {type(model).__name__} does not let its attention be replaced, so it cannot be run here",
            code="model-impl",
        )
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _uninitialised() -> Any:
    try:
        from transformers.initialization import no_init_weights  # noqa: PLC0415 - an optional package
    except ImportError:
        return nullcontext()
    return no_init_weights()


def _split(model: Any) -> None:
    """Split the linear layers that the model's plan names; ConfigError when it has no plan or one we cannot follow."""
    plan = dict(getattr(model.config, "base_model_tp_plan", None) or {})
    unknown = sorted(set(plan.values()) - set(_SPLITS))
    if not plan or unknown:
        reason = f"asks for {', '.join(unknown)}" if unknown else "has no plan for it"
        raise ConfigError(
            f"transformers' {type(model).__name__} cannot be split over ranks: it {reason}",
            code="model-impl",
            fix="use --tensor-parallel-size 1",
        )
    base = model.base_model
    for path, module in list(base.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatch(path, pattern)), None)
        if style is None or not isinstance(module, nn.Linear):
            continue
        cls, more = _SPLITS[style]
        has_bias = module.bias is not None
        parent, _, name = path.rpartition(".")
        layer = cls(module.in_features, module.out_features, bias=has_bias, prefix=path, return_bias=False, **more)
        setattr(base.get_submodule(parent), name, layer)


@contextmanager
def _noting() -> Iterator[list[tuple[nn.Module, dict[str, Any]]]]:
    global _noted  # noqa: PLW0603 - transformers calls a function, which has no other way to know
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    _noted = found
    try:
        yield found
    finally:
        _noted = None


def _is_without_memory(model: nn.Module) -> bool:
    return next(model.parameters()).device.type == "meta"


def _make_attention(
    model: Any, vllm_config: VllmConfig, noted: list[tuple[nn.Module, dict[str, Any]]], prefix: str
) -> Iterator[Attention]:
    """Our layer for each attention module of a model, from what it was called with."""
    # Which layers have a window is what they say themselves.
    cache_config = copy.copy(vllm_config.cache_config)
    cache_config.__dict__.pop("_journal", None)
    cache_config.sliding_window = None
    paths = {module: path for path, module in model.named_modules()}
    for module, facts in noted:
        path = maybe_prefix(prefix, paths[module])
        if module in _layers and _layers[module].layer_name == f"{path}.attn":
            raise ModelFileError(f"{path} attends twice in a step, which is not supported", code="model-impl")
        causal = facts.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            raise ConfigError(f"{path} looks ahead, which is not supported", code="model-impl")
        if facts.get("s_aux") is not None:
            raise ConfigError(f"{path} has attention sinks, which are not supported", code="model-impl")
        scale = facts.get("scaling")
        layer = Attention(
            facts["heads"],
            facts["size"],
            facts["size"] ** -0.5 if scale is None else float(scale),
            num_kv_heads=facts["kv_heads"],
            cache_config=cache_config,
            logits_soft_cap=facts.get("softcap"),
            per_layer_sliding_window=facts.get("sliding_window"),
            prefix=f"{path}.attn",
            **({} if facts["size_v"] == facts["size"] else {"head_size_v": facts["size_v"]}),
        )
        _layers[module] = layer
        yield layer
