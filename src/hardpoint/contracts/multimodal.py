"""Multimodal models: how a model class says what turns media into its inputs. No torch: this runs in the front end.

A model class names three classes with `MULTIMODAL_REGISTRY.register_processor`: what is known of its media
(`BaseProcessingInfo`), how the largest prompt looks (`BaseDummyInputsBuilder`), and what turns media into arrays and
finds their places in the prompt (`BaseMultiModalProcessor`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from hardpoint.contracts.prompt_updates import (
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    UpdateMode,
    apply_updates,
)
from hardpoint.errors import ConfigError, VLLMValidationError
from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger
from hardpoint.types.multimodal import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig, MultiModalConfig

__all__ = [
    "MULTIMODAL_REGISTRY",
    "BaseDummyInputsBuilder",
    "BaseMultiModalProcessor",
    "BaseProcessingInfo",
    "ImageProcessorItems",
    "ImageSize",
    "InputProcessingContext",
    "ModalityDataItems",
    "MultiModalDataItems",
    "MultiModalDataParser",
    "MultiModalDummyOptions",
    "MultiModalRegistry",
    "Processed",
    "ProcessorInputs",
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "UpdateMode",
]

logger = init_logger(__name__)
_C = TypeVar("_C")
# Modality -> count, or an object with a count: the form of `--limit-mm-per-prompt`.
MultiModalDummyOptions: TypeAlias = Mapping[str, Any]


class ImageSize(NamedTuple):
    """Pixels."""

    width: int
    height: int


class ModalityDataItems(list[Any]):
    """The items of one modality."""

    def get_count(self) -> int:
        """How many."""
        return len(self)

    def get(self, index: int) -> Any:
        """One of them."""
        return self[index]

    def get_all(self) -> list[Any]:
        """All of them."""
        return list(self)


class ImageProcessorItems(ModalityDataItems):
    """Images of pillow."""

    def get_image_size(self, item_idx: int) -> ImageSize:
        """The size of one."""
        return ImageSize(*self[item_idx].size)


_ITEMS: dict[str, type[ModalityDataItems]] = {"image": ImageProcessorItems}


class MultiModalDataItems(dict[str, ModalityDataItems]):
    """Modality -> its items, parsed."""

    @classmethod
    def of(cls, items: Mapping[str, Iterable[Any]]) -> MultiModalDataItems:
        """Items by modality, each in the class of its modality."""
        return cls({modality: _ITEMS.get(modality, ModalityDataItems)(listed) for modality, listed in items.items()})

    def get_count(self, modality: str, *, strict: bool = True) -> int:
        """Items of a modality."""
        return len(self.get(modality, ()))

    def get_all_counts(self) -> dict[str, int]:
        """Modality -> its number of items."""
        return {modality: len(items) for modality, items in self.items()}

    def get_items(self, modality: str, typ: Any = list) -> Any:
        """Items of a modality; KeyError when there are none."""
        return self[modality]


class MultiModalDataParser:
    """Turns what callers give into items."""

    def parse_mm_data(self, mm_data: Mapping[str, Any]) -> MultiModalDataItems:
        """Modality -> item or list of items, as lists; modalities without an item are left out."""
        listed = {
            modality: list(given) if isinstance(given, (list, tuple)) else [given]
            for modality, given in mm_data.items()
            if given is not None
        }
        return MultiModalDataItems.of({modality: items for modality, items in listed.items() if items})


@dataclass(frozen=True)
class InputProcessingContext:
    """What a processor knows: the model and its tokenizer (None: prompts are ids)."""

    model_config: ModelConfig
    tokenizer: Any

    def get_tokenizer(self) -> Any:
        """The tokenizer. ValueError with skip_tokenizer_init."""
        if self.tokenizer is None:
            raise ValueError("the server runs without a tokenizer (--skip-tokenizer-init)")
        return self.tokenizer

    def get_hf_config(self, typ: Any = None) -> Any:
        """The model's facts."""
        return self.model_config.hf_config

    def get_mm_config(self) -> MultiModalConfig:
        """The media section."""
        return self.model_config.get_multimodal_config()

    def get_merged_mm_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`--mm-processor-kwargs`, with a request's own on top."""
        return {**(self.get_mm_config().mm_processor_kwargs or {}), **kwargs}

    def get_hf_processor(self, typ: Any = None, /, **kwargs: Any) -> Any:
        """The model's processor from transformers, for processors that use one; ConfigError without the package."""
        try:
            processors = load_ref("transformers:AutoProcessor")
        except ImportError:
            raise ConfigError(
                f"the processor of {self.model_config.architecture} needs transformers, which is not installed",
                code="multimodal-transformers",
                fix="pip install 'hardpoint[transformers]'",
            ) from None
        return processors.from_pretrained(self.model_config.local_path, **self.get_merged_mm_kwargs(kwargs))

    def call_hf_processor(self, hf_processor: Any, data: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a processor of transformers with text and media."""
        return hf_processor(**data, **self.get_merged_mm_kwargs(kwargs), return_tensors="np")


class BaseProcessingInfo(ABC):
    """What is known of a model's media without processing any."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        self.ctx = ctx

    @property
    def model_id(self) -> str:
        """The model's name."""
        return self.ctx.model_config.model

    def get_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.ctx.get_tokenizer()

    def get_hf_config(self) -> Any:
        """The model's facts."""
        return self.ctx.get_hf_config()

    def get_hf_processor(self, **kwargs: object) -> Any:
        """The model's processor from transformers."""
        return self.ctx.get_hf_processor(**kwargs)

    def get_data_parser(self) -> MultiModalDataParser:
        """What reads the callers' items."""
        return MultiModalDataParser()

    @abstractmethod
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Modality -> most items per prompt; None = any number."""

    def get_allowed_mm_limits(self) -> dict[str, int]:
        """The same, within `--limit-mm-per-prompt`."""
        config = self.ctx.get_mm_config()
        allowed = {}
        for modality, supported in self.get_supported_mm_limits().items():
            asked = config.get_limit_per_prompt(modality)
            allowed[modality] = asked if supported is None else min(asked, supported)
        return allowed

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Modality -> tokens of the largest item; None: found by processing the dummy inputs."""
        return None

    def validate_mm_processor_kwargs(self, kwargs: Mapping[str, Any]) -> None:  # noqa: B027 - optional
        """Refuse options the processor does not have; ValueError naming the first."""


@dataclass
class ProcessorInputs:
    """A prompt with its media.

    prompt                  text or token ids, with the media's placeholders
    hf_processor_mm_kwargs  the request's own options
    """

    prompt: str | list[int]
    mm_data_items: MultiModalDataItems
    hf_processor_mm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenization_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Processed:
    """A prompt whose media are processed: ids with the placeholders filled in, items, and where they stand."""

    prompt_token_ids: list[int]
    mm_kwargs: MultiModalKwargsItems
    mm_placeholders: dict[str, list[PlaceholderRange]]


class BaseDummyInputsBuilder(ABC):
    """How the largest prompt looks, for models whose largest item is found by trying."""

    def __init__(self, info: BaseProcessingInfo) -> None:
        self.info = info

    @abstractmethod
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """A text with so many placeholders."""

    @abstractmethod
    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """So many items of the largest kind."""

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any] | None = None
    ) -> ProcessorInputs:
        """Both together."""
        data = self.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        return ProcessorInputs(self.get_dummy_text(mm_counts), self.info.get_data_parser().parse_mm_data(data))


class BaseMultiModalProcessor(ABC):
    """Turns media into a model's arrays and fills their places in the prompt.

    Called  in the front end, in threads: several requests at once.
    Fault   what it raises is the answer of that request: a ValueError as the client's mistake.
    """

    def __init__(self, info: BaseProcessingInfo, dummy_inputs: BaseDummyInputsBuilder, *, cache: Any = None) -> None:
        self.info = info
        self.dummy_inputs = dummy_inputs
        self.cache = cache

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """How each output is cut into items."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        """What becomes of the placeholders."""

    def _call_hf_processor(
        self, prompt: str, mm_data: Mapping[str, Any], mm_kwargs: Mapping[str, Any], tok_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The outputs for these media; by default those of the model's processor from transformers.

        mm_data  "images", "videos", "audios" -> list of items
        """
        return self.info.ctx.call_hf_processor(
            self.info.get_hf_processor(**mm_kwargs), {"text": prompt, **mm_data}, {**mm_kwargs, **tok_kwargs}
        )

    def process_items(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, Any]
    ) -> MultiModalKwargsItems:
        """Process media without their prompt. Equal media give equal results, whoever stands beside them."""
        counts = mm_items.get_all_counts()
        data = {f"{modality}s": list(items) for modality, items in mm_items.items()}
        outputs = self._call_hf_processor(self.dummy_inputs.get_dummy_text(counts), data, hf_processor_mm_kwargs, {})
        made = {name: value for name, value in outputs.items() if name not in ("input_ids", "attention_mask")}
        return MultiModalKwargsItems.from_hf_inputs(made, self._get_mm_fields_config(made, hf_processor_mm_kwargs))

    def apply(
        self,
        inputs: ProcessorInputs,
        process: Callable[[MultiModalDataItems, Mapping[str, Any]], MultiModalKwargsItems] | None = None,
    ) -> Processed:
        """Process a prompt with its media.

        process  does it for the media; the caller may keep what it made before
        VLLMValidationError for a prompt whose placeholders do not fit its media.
        """
        kwargs = inputs.hf_processor_mm_kwargs
        made = (process or self.process_items)(inputs.mm_data_items, kwargs)
        counts = inputs.mm_data_items.get_all_counts()
        for modality, count in counts.items():
            if len(made.get(modality, ())) != count:
                raise VLLMValidationError(
                    f"{type(self).__name__} made {len(made.get(modality, ()))} items of {count} {modality}(s)",
                    parameter="multi_modal_data",
                )
        ids = inputs.prompt
        if isinstance(ids, str):
            ids = self.info.get_tokenizer().encode(ids, **inputs.tokenization_kwargs)
        updates = self._get_prompt_updates(inputs.mm_data_items, kwargs, made)
        filled, places = apply_updates(list(ids), updates, counts, self.info.ctx.tokenizer)
        return Processed(filled, made, places)


@dataclass(frozen=True)
class ProcessorFactories:
    """The three classes of a model, or references to them ("module:Class")."""

    info: Any
    processor: Any
    dummy_inputs: Any

    def build(self, ctx: InputProcessingContext) -> BaseMultiModalProcessor:
        """Make the processor; ConfigError naming what it raises."""
        info, processor, dummy = (load_ref(part) if isinstance(part, str) else part for part in vars(self).values())
        made = info(ctx)
        return processor(made, dummy(made))


class MultiModalRegistry:
    """Which processor belongs to which model class: the class itself knows."""

    def register_processor(self, processor: Any, *, info: Any, dummy_inputs: Any) -> Callable[[type[_C]], type[_C]]:
        """Class decorator of a model class: name what processes its media.

        Each of the three is a class, or a callable that makes one's instance. A second registration for the same
        class replaces the first, with a warning.
        """

        def decorate(model_cls: type[_C]) -> type[_C]:
            if "_processor_factory" in vars(model_cls):
                logger.warning(
                    "Model class %s already has a multi-modal processor registered, it is replaced",
                    model_cls.__qualname__,
                )
            model_cls._processor_factory = ProcessorFactories(info, processor, dummy_inputs)  # type: ignore[attr-defined]
            return model_cls

        return decorate

    def factories_of(self, model_cls: type) -> ProcessorFactories | None:
        """What a class or one it derives from has registered."""
        return getattr(model_cls, "_processor_factory", None)

    def create_processor(
        self, model_config: ModelConfig, *, tokenizer: Any = None, cache: Any = None
    ) -> BaseMultiModalProcessor:
        """The processor of a configured model, which is imported for it unless it is a built-in one.

        ConfigError when the model takes no media or its class has registered none.
        """
        chosen = model_config.model_class
        model_config.get_multimodal_config()
        assert chosen is not None, "the model class is chosen before media are settled"
        factories: Any = load_ref("hardpoint.types.model_info:BUILT_IN_PROCESSORS").get(chosen.path)
        found = ProcessorFactories(*factories) if factories else self.factories_of(load_ref(chosen.path))
        if found is None:
            raise ConfigError(
                f"model class {chosen.architecture} ({chosen.path}) takes media and has no processor for them",
                code="multimodal-processor",
                origin=chosen.owner,
                fix="decorate it with MULTIMODAL_REGISTRY.register_processor(...)",
            )
        return found.build(InputProcessingContext(model_config, tokenizer))

    def supports_multimodal_inputs(self, model_config: ModelConfig) -> bool:
        """Whether prompts may hold media: the model takes them and a limit above 0 lets them in."""
        config = model_config.multimodal_config
        return config is not None and not config.language_model_only


MULTIMODAL_REGISTRY = MultiModalRegistry()
