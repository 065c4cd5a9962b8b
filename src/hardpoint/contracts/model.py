"""What a model class offers: the calls every model answers, and the abilities it may declare.

Built   once per worker by the loader, with `vllm_config` and `prefix`, inside the current config.
Called  `forward` every step inside a forward context, then `compute_logits` on the rows that need it.
Fault   what it raises ends the engine, and all requests with it.

An ability is declared with a class attribute (or by deriving from its protocol); the `supports_*`
functions answer for a class or an instance and warn about half a declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from hardpoint.log import init_logger
from hardpoint.types.model_info import Inspection, ModelInfo

logger = init_logger(__name__)


class IntermediateTensors:
    """What one pipeline stage hands to the next: name -> tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor], kv_connector_output: Any = None) -> None:
        self.tensors = tensors
        self.kv_connector_output = kv_connector_output

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, slice):
            return type(self)({name: tensor[key] for name, tensor in self.tensors.items()})
        return self.tensors[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.tensors[key] = value

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntermediateTensors) or self.tensors.keys() != other.tensors.keys():
            return False
        return all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)

    __hash__ = None  # type: ignore[assignment]

    def items(self) -> Any:
        """Names with their tensors."""
        return self.tensors.items()

    def __repr__(self) -> str:
        return f"IntermediateTensors({ {name: tuple(tensor.shape) for name, tensor in self.tensors.items()} })"


@runtime_checkable
class VllmModel(Protocol):
    """Every model.

    embed_input_ids  [tokens] -> [tokens, hidden]
    forward          [tokens] ids or [tokens, hidden] embeddings, and [tokens] positions -> [tokens, hidden]
    """

    def __init__(self, vllm_config: Any, prefix: str = "") -> None: ...

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look the tokens' embeddings up."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states of a step's rows."""


@runtime_checkable
class VllmModelForTextGeneration(VllmModel, Protocol):
    """A model that generates text."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]; None on tensor-parallel ranks that do not sample."""


@runtime_checkable
class VllmModelForPooling(VllmModel, Protocol):
    """A model that turns a sequence into vectors or scores."""

    is_pooling_model: ClassVar[Literal[True]] = True
    default_seq_pooling_type: ClassVar[str] = "LAST"
    default_tok_pooling_type: ClassVar[str] = "ALL"
    attn_type: ClassVar[str] = "decoder"
    score_type: ClassVar[str] = "bi-encoder"
    pooler: Any


@runtime_checkable
class SupportsPP(Protocol):
    """A model that can be spread over pipeline stages.

    `forward` takes `intermediate_tensors` and returns IntermediateTensors on all but the last stage.
    """

    supports_pp: ClassVar[Literal[True]] = True
    # (batch_size, dtype, device) -> what this stage receives, without content; often set by the constructor.
    make_empty_intermediate_tensors: Callable[[int, torch.dtype, torch.device], IntermediateTensors]
    forward: Callable[..., Any]


@runtime_checkable
class SupportsLoRA(Protocol):
    """A model whose layers can carry adapters.

    packed_modules_mapping  fused layer -> the names of its parts in a checkpoint
    embedding_modules       embedding layer -> its kind
    """

    supports_lora: ClassVar[Literal[True]] = True
    is_3d_moe_weight: ClassVar[bool] = False
    is_non_gated_moe: ClassVar[bool] = False
    lora_skip_prefixes: ClassVar[list[str]] = []
    embedding_modules: ClassVar[dict[str, str]] = {}
    packed_modules_mapping: dict[str, list[str]] = {}


class SupportsQuant:
    """A model whose quantisation settings speak of the model's own layer names.

    The mapper and the fused names of the class reach the settings before the first layer is built.
    """

    hf_to_vllm_mapper: ClassVar[Any] = None
    packed_modules_mapping: ClassVar[dict[str, list[str]] | None] = None
    quant_config: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> SupportsQuant:
        """Allocate, with the quantisation settings bound to the class's names."""
        instance = super().__new__(cls)
        quant_config = _quant_config_in(args, kwargs)
        if quant_config is not None:
            instance.quant_config = quant_config
            bind_quant_config(quant_config, cls)
        return instance


def _quant_config_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    for value in (*args, *kwargs.values()):
        quant_config = getattr(value, "quant_config", None)
        if quant_config is not None and hasattr(quant_config, "packed_modules_mapping"):
            return quant_config
        if hasattr(value, "get_quant_method"):
            return value
    return None


def bind_quant_config(quant_config: Any, model_cls: type) -> None:
    """Tell quantisation settings the layer names and fused layers of a model class."""
    mapper = getattr(model_cls, "hf_to_vllm_mapper", None)
    if mapper is not None:
        quant_config.apply_vllm_mapper(mapper)
    packed = getattr(model_cls, "packed_modules_mapping", None)
    if packed:
        quant_config.packed_modules_mapping.update(packed)


@runtime_checkable
class HasInnerState(Protocol):
    """A model that keeps a state of its own between steps."""

    has_inner_state: ClassVar[Literal[True]] = True


@runtime_checkable
class IsAttentionFree(Protocol):
    """A model without attention."""

    is_attention_free: ClassVar[Literal[True]] = True


@runtime_checkable
class IsHybrid(Protocol):
    """A model with attention and recurrent layers."""

    is_hybrid: ClassVar[Literal[True]] = True


@runtime_checkable
class HasNoOps(Protocol):
    """A model with layers that do nothing."""

    has_noops: ClassVar[Literal[True]] = True


# Per item [embeddings, hidden], or [items, embeddings, hidden].
MultiModalEmbeddings: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...] | torch.Tensor


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model that takes media. Its class names their processor with `MULTIMODAL_REGISTRY.register_processor`."""

    supports_multimodal: ClassVar[Literal[True]] = True
    supports_multimodal_raw_input_only: ClassVar[bool] = False
    supports_encoder_tp_data: ClassVar[bool] = False
    requires_raw_input_tokens: ClassVar[bool] = False

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands in a text for the `i`-th item (from 1) of a modality; ValueError for one it does not take."""
        raise NotImplementedError

    @contextmanager
    def _mark_language_model(self, vllm_config: Any, *, targets: Any = None) -> Iterator[None]:
        """For the constructor: what is set as an attribute inside the block is the part that generates text."""
        modules: dict[str, Any] = vars(self)["_modules"]
        before = set(modules)
        yield
        made = [name for name in modules if name not in before]
        if made:
            vars(self)["_language_model_name"] = made[0]

    @contextmanager
    def _mark_tower_model(self, vllm_config: Any, modalities: Any) -> Iterator[None]:
        """For the constructor: what is made inside the block looks at media."""
        yield

    def embed_multimodal(self, **kwargs: object) -> Any:
        """The embeddings of items: per item [tokens, hidden], or [items, tokens, hidden].

        kwargs  what the processor made of them, as tensors
        """
        raise NotImplementedError

    def get_language_model(self) -> nn.Module:
        """The part that generates text: what the constructor marked as such."""
        name = vars(self).get("_language_model_name")
        if name is None:
            raise NotImplementedError(f"{type(self).__qualname__} lacks get_language_model()")
        found: nn.Module = vars(self)["_modules"][name]
        return found

    def embed_input_ids(
        self, input_ids: torch.Tensor, multimodal_embeddings: Any = None, *, is_multimodal: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[tokens] ids -> [tokens, hidden], with the media's embeddings where `is_multimodal` [tokens] says so."""
        texts = self.get_language_model().embed_input_ids
        if multimodal_embeddings is None or is_multimodal is None:
            return texts(input_ids)  # type: ignore[operator]
        # A placeholder may have no embedding of its own.
        embeds = texts(input_ids.masked_fill(is_multimodal, 0))  # type: ignore[operator]
        return merge_multimodal_embeddings(embeds, multimodal_embeddings, is_multimodal)


def merge_multimodal_embeddings(
    inputs_embeds: torch.Tensor, multimodal_embeddings: Any, is_multimodal: torch.Tensor
) -> torch.Tensor:
    """Put the rows of `multimodal_embeddings` (one tensor or several, in order) where `is_multimodal` [tokens] is set.

    Changes `inputs_embeds` [tokens, hidden] and returns it. ValueError when the numbers differ.
    """
    parts = [multimodal_embeddings] if isinstance(multimodal_embeddings, torch.Tensor) else multimodal_embeddings
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    places = int(is_multimodal.sum())
    if len(rows) != places:
        raise ValueError(f"{len(rows)} multimodal embeddings for {places} placeholder tokens")
    inputs_embeds[is_multimodal] = rows.to(inputs_embeds.dtype)
    return inputs_embeds


@runtime_checkable
class SupportsTranscription(Protocol):
    """A model that turns speech into text."""

    supports_transcription: ClassVar[Literal[True]] = True
    supports_transcription_only: ClassVar[bool] = False


@runtime_checkable
class SupportsCrossEncoding(Protocol):
    """A model that scores a pair of texts read together."""

    score_type: ClassVar[str] = "cross-encoder"


@runtime_checkable
class SupportsMRoPE(Protocol):
    """A model with positions in several dimensions."""

    supports_mrope: ClassVar[Literal[True]] = True

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """[3, tokens] positions and the offset of what follows."""


@runtime_checkable
class MixtureOfExperts(Protocol):
    """A model with experts."""

    expert_weights: Any
    num_moe_layers: int
    num_expert_groups: int
    num_logical_experts: int
    num_physical_experts: int
    num_local_physical_experts: int
    num_routed_experts: int
    num_shared_experts: int
    num_redundant_experts: int


def accepts_keyword(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` can be called with the keyword argument `name`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind is inspect.Parameter.VAR_KEYWORD or (p.name == name and p.kind in keyword) for p in parameters)


def is_vllm_model(model: type | object) -> bool:
    """Whether a class or object has the constructor, the embedding look-up and the forward of a model."""
    if not _takes_config(model):
        return False
    lacks = _lacks_of_model(model)
    for what in lacks:
        logger.warning_once("The model class %s lacks %s", _class_of(model).__qualname__, what)
    return not lacks


def _takes_config(model: type | object) -> bool:
    return accepts_keyword(_class_of(model).__init__, "vllm_config")  # type: ignore[misc]


def _lacks_of_model(model: type | object) -> list[str]:
    lacks = [] if callable(getattr(model, "embed_input_ids", None)) else ["embed_input_ids(input_ids)"]
    forward = getattr(model, "forward", None)
    missing = [name for name in ("input_ids", "positions") if forward is None or not accepts_keyword(forward, name)]
    return [*lacks, f"the keyword arguments {', '.join(missing)} of forward"] if missing else lacks


def is_text_generation_model(model: type | object) -> bool:
    """Whether a class or object is a model that generates text."""
    return is_vllm_model(model) and callable(getattr(model, "compute_logits", None))


def is_pooling_model(model: type | object) -> bool:
    """Whether a class or object is a model that pools."""
    return is_vllm_model(model) and bool(getattr(model, "is_pooling_model", False))


def supports_pp(model: type | object) -> bool:
    """Whether a class or object can be spread over pipeline stages; warns about half a declaration."""
    lacks = _lacks_of_stages(model)
    if lacks:
        logger.warning_once(
            "The model class %s declares supports_pp but lacks %s", _class_of(model).__qualname__, lacks
        )
    return _declares_stages(model) and not lacks


def _declares_stages(model: type | object) -> bool:
    return SupportsPP in _class_of(model).__mro__ or bool(getattr(model, "supports_pp", False))


def _lacks_of_stages(model: type | object) -> str:
    if not _declares_stages(model):
        return ""
    # One that derives from the protocol may make it in its constructor.
    if SupportsPP not in _class_of(model).__mro__ and not hasattr(model, "make_empty_intermediate_tensors"):
        return "make_empty_intermediate_tensors"
    takes = accepts_keyword(getattr(model, "forward", len), "intermediate_tensors")
    return "" if takes else "the argument intermediate_tensors of forward"


def supports_lora(model: type | object) -> bool:
    """Whether a class or object can carry adapters; warns about half a declaration."""
    lacks = _lacks_of_adapters(model)
    if lacks:
        logger.warning_once(
            "The model class %s declares supports_lora but lacks %s", _class_of(model).__qualname__, lacks
        )
    return bool(getattr(model, "supports_lora", False)) and not lacks


def _lacks_of_adapters(model: type | object) -> str:
    if not getattr(model, "supports_lora", False):
        return ""
    return ", ".join(name for name in ("packed_modules_mapping", "embedding_modules") if not hasattr(model, name))


def supports_multimodal(model: type | object) -> bool:
    """Whether a class or object takes media."""
    return bool(getattr(model, "supports_multimodal", False))


def supports_transcription(model: type | object) -> bool:
    """Whether a class or object turns speech into text."""
    return bool(getattr(model, "supports_transcription", False))


def supports_mrope(model: type | object) -> bool:
    """Whether a class or object has positions in several dimensions."""
    return bool(getattr(model, "supports_mrope", False))


def supports_cross_encoding(model: type | object) -> bool:
    """Whether a class or object scores a pair of texts read together."""
    return is_pooling_model(model) and getattr(model, "score_type", "") == "cross-encoder"


def has_inner_state(model: type | object) -> bool:
    """Whether a class or object keeps a state of its own."""
    return bool(getattr(model, "has_inner_state", False))


def is_attention_free(model: type | object) -> bool:
    """Whether a class or object has no attention."""
    return bool(getattr(model, "is_attention_free", False))


def is_hybrid(model: type | object) -> bool:
    """Whether a class or object mixes attention and recurrent layers."""
    return bool(getattr(model, "is_hybrid", False))


def has_noops(model: type | object) -> bool:
    """Whether a class or object has layers that do nothing."""
    return bool(getattr(model, "has_noops", False))


def is_mixture_of_experts(model: object) -> bool:
    """Whether an object has experts."""
    return isinstance(model, MixtureOfExperts) and model.num_moe_layers > 0


def default_pooling_type(*, seq_pooling_type: str = "LAST", tok_pooling_type: str = "ALL") -> Callable[[type], type]:
    """Class decorator: how the model pools a sequence and its tokens unless told otherwise."""

    def decorate(cls: type) -> type:
        cls.default_seq_pooling_type = seq_pooling_type  # type: ignore[attr-defined]
        cls.default_tok_pooling_type = tok_pooling_type  # type: ignore[attr-defined]
        return cls

    return decorate


def attn_type(value: str) -> Callable[[type], type]:
    """Class decorator: who attends to whom in the model."""

    def decorate(cls: type) -> type:
        cls.attn_type = value  # type: ignore[attr-defined]
        return cls

    return decorate


def _class_of(model: type | object) -> type:
    return model if isinstance(model, type) else type(model)


def score_type_of(cls: type) -> str:
    """The one score type a class and its bases declare; AssertionError when they declare two."""
    found = {str(base.__dict__["score_type"]) for base in cls.__mro__ if "score_type" in base.__dict__}
    found.discard("bi-encoder")
    assert len(found) <= 1, f"{cls.__qualname__} inherits different score types: {sorted(found)}"
    return next(iter(found), "bi-encoder")


def inspect_model_class(cls: type[nn.Module]) -> ModelInfo:
    """Report what a model class declares; this is what the inspector process runs. Logs nothing: see `remarks_on`."""
    is_model = _takes_config(cls) and not _lacks_of_model(cls)
    return ModelInfo(
        architecture=cls.__name__,
        is_text_generation_model=is_model and callable(getattr(cls, "compute_logits", None)),
        is_pooling_model=is_model and bool(getattr(cls, "is_pooling_model", False)),
        attn_type=str(getattr(cls, "attn_type", "decoder")),
        default_seq_pooling_type=str(getattr(cls, "default_seq_pooling_type", "LAST")),
        default_tok_pooling_type=str(getattr(cls, "default_tok_pooling_type", "ALL")),
        score_type=score_type_of(cls),
        supports_multimodal=supports_multimodal(cls),
        supports_multimodal_raw_input_only=bool(getattr(cls, "supports_multimodal_raw_input_only", False)),
        requires_raw_input_tokens=bool(getattr(cls, "requires_raw_input_tokens", False)),
        supports_multimodal_encoder_tp_data=bool(getattr(cls, "supports_encoder_tp_data", False)),
        supports_pp=_declares_stages(cls) and not _lacks_of_stages(cls),
        has_inner_state=has_inner_state(cls),
        is_attention_free=is_attention_free(cls),
        is_hybrid=is_hybrid(cls),
        has_noops=has_noops(cls),
        supports_transcription=supports_transcription(cls),
        supports_transcription_only=bool(getattr(cls, "supports_transcription_only", False)),
        supports_lora=bool(getattr(cls, "supports_lora", False)) and not _lacks_of_adapters(cls),
    )


def remarks_on(cls: type[nn.Module]) -> list[str]:
    """What a class lacks to be served, or to do what it declares, in words."""
    remarks = [] if _takes_config(cls) else ["its constructor takes no vllm_config"]
    remarks += [f"it lacks {what}" for what in _lacks_of_model(cls)]
    pools = bool(getattr(cls, "is_pooling_model", False))
    if not pools and not callable(getattr(cls, "compute_logits", None)):
        remarks.append("it lacks compute_logits(hidden_states)")
    halves = {"supports_pp": _lacks_of_stages(cls), "supports_lora": _lacks_of_adapters(cls)}
    return remarks + [f"it declares {name} but lacks {what}" for name, what in halves.items() if what]


def inspection_of(cls: type[nn.Module]) -> Inspection:
    """All that is to be known of a model class; AssertionError when it inherits two score types."""
    return Inspection(inspect_model_class(cls), f"{cls.__module__}:{cls.__qualname__}", tuple(remarks_on(cls)))


WeightsIterator = Iterable[tuple[str, torch.Tensor]]
