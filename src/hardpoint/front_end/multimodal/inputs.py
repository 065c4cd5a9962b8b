"""The media of prompts on their way to the engine: counted, named by content, processed once."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.contracts.multimodal import (
    MULTIMODAL_REGISTRY,
    BaseMultiModalProcessor,
    MultiModalDataItems,
    ProcessorInputs,
)
from hardpoint.errors import VLLMValidationError
from hardpoint.extensions.refs import load_ref
from hardpoint.front_end.multimodal.fetch import MediaFetcher
from hardpoint.front_end.multimodal.images import as_image, too_bad
from hardpoint.front_end.multimodal.parts import MediaPart, MediaParts, MediaReader
from hardpoint.types.model_info import BUILT_IN_PROCESSORS
from hardpoint.types.multimodal import MultiModalKwargsItem, MultiModalKwargsItems, mm_input
from hardpoint.types.stats import MultiModalCacheStats

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig

_IO_OPTIONS = {"image": ("image_mode", "rgba_background_color")}


class MediaInputs:
    """What a front end does with the media of prompts, for one model that takes some. Used by several threads."""

    def __init__(self, model_config: ModelConfig, tokenizer: Any) -> None:
        self._model_config = model_config
        self._tokenizer = tokenizer
        self._config = model_config.get_multimodal_config()
        self._cache = _ProcessedItems(int(self._config.mm_processor_cache_gb * 2**30))
        self._hash = _hasher(self._config.mm_hasher_algorithm)

    @cached_property
    def processor(self) -> BaseMultiModalProcessor:
        """The model's processor."""
        return MULTIMODAL_REGISTRY.create_processor(self._model_config, tokenizer=self._tokenizer)

    @cached_property
    def _limits(self) -> dict[str, int]:
        return self.processor.info.get_allowed_mm_limits()

    @cached_property
    def _reader(self) -> MediaReader:
        fetcher = MediaFetcher(self._model_config.allowed_local_media_path, self._model_config.allowed_media_domains)
        return MediaReader(fetcher, self._config.media_io_kwargs)

    @cached_property
    def _placeholder_of(self) -> Callable[[str, int], str | None]:
        chosen = self._model_config.model_class
        assert chosen is not None, "the model class is chosen before there are prompts"
        if chosen.path in BUILT_IN_PROCESSORS:
            return lambda modality, number: self.processor.dummy_inputs.get_dummy_text({modality: 1}) or None
        found: Callable[[str, int], str | None] = load_ref(chosen.path).get_placeholder_str
        return found

    def _placeholder(self, modality: str, number: int) -> str | None:
        if modality not in self._limits:
            return None
        try:
            return self._placeholder_of(modality, number)
        except ValueError:
            return None

    def new_parts(self) -> MediaParts:
        """A collector for one conversation's media."""
        return MediaParts(self._placeholder, self._config.interleave_mm_strings, lambda name: self._limits.get(name, 0))

    def read(self, parts: Sequence[MediaPart], options: Mapping[str, Any] | None) -> dict[str, list[Any]]:
        """Modality -> the items that the parts of a conversation point at; waits for other servers."""
        check_io_options(options)
        return self._reader.read(parts, options)

    def take_stats(self) -> MultiModalCacheStats | None:
        """How often processed items came again, since the last call; None when there was none."""
        return self._cache.take_stats()

    def reset(self) -> None:
        """Forget processed items."""
        self._cache.clear()

    def process(
        self,
        token_ids: list[int],
        data: Mapping[str, Any],
        processor_options: Mapping[str, Any] | None = None,
        io_options: Mapping[str, Any] | None = None,
        *,
        text: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Process a prompt's media and fill their places in: a prompt dict as `mm_input` makes it.

        data  modality -> item or list of items
        VLLMValidationError for items or placeholders that do not fit each other or the model.
        """
        check_io_options(io_options)
        options = dict(processor_options or {})
        items = self._parsed(data, {**self._config.media_io_kwargs, **(io_options or {})})
        names = {
            modality: [self._name(modality, item, options) for item in listed] for modality, listed in items.items()
        }
        inputs = ProcessorInputs(token_ids, items, options)
        try:
            made = self.processor.apply(inputs, lambda items, options: self._processed(items, options, names))
        except VLLMValidationError:
            raise
        except ValueError as error:
            raise too_bad("the media", "multi_modal_data", error) from None
        return mm_input(made.prompt_token_ids, made.mm_kwargs, names, made.mm_placeholders, text, cache_salt)

    def _parsed(self, data: Mapping[str, Any], io_options: Mapping[str, Any]) -> MultiModalDataItems:
        items = self.processor.info.get_data_parser().parse_mm_data(data)
        for modality, listed in items.items():
            if modality not in self._limits:
                raise VLLMValidationError(
                    f"this model takes {', '.join(self._limits) or 'no media'}, not {modality}",
                    parameter="multi_modal_data",
                )
            if len(listed) > self._limits[modality]:
                raise VLLMValidationError(
                    f"At most {self._limits[modality]} {modality}(s) may be provided in one prompt.",
                    parameter="multi_modal_data",
                    value=len(listed),
                )
        if "image" in items:
            images = (_as_image(item, number, io_options.get("image")) for number, item in enumerate(items["image"]))
            items.update(MultiModalDataItems.of({"image": images}))
        return items

    def _name(self, modality: str, item: Any, options: Mapping[str, Any]) -> str:
        """The same for equal content processed alike, by whatever name it came."""
        digest = self._hash()
        digest.update(json.dumps([self._model_config.model, modality, options], sort_keys=True, default=str).encode())
        return digest.hexdigest() if _feed(digest.update, item) else uuid.uuid4().hex

    def _processed(
        self, items: MultiModalDataItems, options: Mapping[str, Any], names: Mapping[str, Sequence[str]]
    ) -> MultiModalKwargsItems:
        """Each item by itself, so that what it becomes does not depend on others."""
        made = MultiModalKwargsItems()
        for modality, listed in items.items():
            made[modality] = [
                self._cache.get(name, partial(self._one, modality, item, options))
                for name, item in zip(names[modality], listed, strict=True)
            ]
        return made

    def _one(self, modality: str, item: Any, options: Mapping[str, Any]) -> MultiModalKwargsItem:
        made = self.processor.process_items(MultiModalDataItems.of({modality: [item]}), options).get(modality, [])
        if len(made) != 1:
            raise ValueError(f"the processor made {len(made)} items of one {modality}")
        return made[0]


def _as_image(item: Any, number: int, options: Mapping[str, Any] | None) -> Any:
    try:
        return as_image(item, options)
    except ValueError as error:
        raise too_bad(f"image {number}", f"multi_modal_data.image.{number}", error) from None


def check_io_options(options: Mapping[str, Any] | None) -> None:
    """Refuse options for reading media that nobody knows."""
    for modality, given in (options or {}).items():
        known = _IO_OPTIONS.get(modality, ())
        unknown = [str(name) for name in given if name not in known] if isinstance(given, Mapping) else ["its value"]
        if unknown:
            raise VLLMValidationError(
                f"media_io_kwargs.{modality}: {unknown[0]} is not known; known are {', '.join(known) or 'none'}",
                parameter="media_io_kwargs",
            )


class _ProcessedItems:
    """Processed items by name, up to a size in bytes; the longest unused go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, MultiModalKwargsItem] = OrderedDict()
        self._bytes = 0
        self._stats = MultiModalCacheStats()
        self._lock = threading.Lock()

    def get(self, name: str, make: Callable[[], MultiModalKwargsItem]) -> MultiModalKwargsItem:
        """An item; made when it is not there."""
        with self._lock:
            found = self._kept.get(name)
            self._stats.requests += 1
            self._stats.queries += 1
            self._stats.hits += found is not None
            if found is not None:
                self._kept.move_to_end(name)
                return found
        made = make()
        with self._lock:
            if name not in self._kept and made.nbytes <= self._max_bytes:
                self._kept[name] = made
                self._bytes += made.nbytes
            while self._bytes > self._max_bytes:
                _, old = self._kept.popitem(last=False)
                self._bytes -= old.nbytes
        return made

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            self._stats.reset = True

    def take_stats(self) -> MultiModalCacheStats | None:
        """What happened since the last call; None for nothing."""
        if not self._stats.queries and not self._stats.reset:
            return None
        with self._lock:
            taken, self._stats = self._stats, MultiModalCacheStats()
        return taken


def _hasher(algorithm: str) -> Callable[[], Any]:
    if algorithm == "blake3":
        try:
            found: Callable[[], Any] = load_ref("blake3:blake3")
        except ImportError:
            return hashlib.sha256
        return found
    return hashlib.sha512 if algorithm == "sha512" else hashlib.sha256


def _feed(update: Callable[[bytes], object], item: Any) -> bool:
    """Feed an item's content to a digest; False for a kind of item whose content is not known."""
    if isinstance(item, bytes | str):
        raw = item.encode() if isinstance(item, str) else item
        update(f"{type(item).__name__} {len(raw)} ".encode())
        update(raw)
        return True
    if isinstance(item, np.ndarray) and item.dtype.kind in "biufc":
        update(f"array {item.dtype} {item.shape} ".encode())
        update(np.ascontiguousarray(item).tobytes())
        return True
    if isinstance(item, int | float | bool | None):
        update(f"{item!r} ".encode())
        return True
    if isinstance(item, tuple | list):
        update(f"list {len(item)} ".encode())
        return all(_feed(update, part) for part in item)
    if hasattr(item, "tobytes") and hasattr(item, "mode") and hasattr(item, "size"):
        update(f"image {item.mode} {item.size} ".encode())
        update(item.tobytes())
        return True
    return False
