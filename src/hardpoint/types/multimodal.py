"""Media on their way through the engine: what a processor made of an image, and where in the prompt it stands."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np

# Modality -> one item or a list of them, as callers give them.
MultiModalDataDict: TypeAlias = Mapping[str, Any]
# Modality -> the callers' names for the items.
MultiModalUUIDDict: TypeAlias = Mapping[str, Any]


class PlaceholderRange(msgspec.Struct, array_like=True, frozen=True, eq=False):
    """Tokens of a prompt that an item's embeddings stand for.

    offset    the first token
    length    how many
    is_embed  [length] bool: which of them get an embedding; None = all
    """

    offset: int
    length: int
    is_embed: np.ndarray | None = None

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.offset + self.length

    def get_num_embeds(self) -> int:
        """How many embeddings the item has."""
        return self.length if self.is_embed is None else int(np.count_nonzero(self.is_embed))

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        """Which of the item's embeddings belong to its tokens from `start` to before `end`."""
        if self.is_embed is None:
            return start, end
        return int(np.count_nonzero(self.is_embed[:start])), int(np.count_nonzero(self.is_embed[:end]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return False
        return (self.offset, self.length) == (other.offset, other.length) and np.array_equal(_mask(self), _mask(other))

    __hash__ = None  # type: ignore[assignment]


def _mask(place: PlaceholderRange) -> np.ndarray:
    return np.ones(place.length, bool) if place.is_embed is None else place.is_embed


class MultiModalBatchedField(msgspec.Struct, tag="batched", frozen=True):
    """One row of an array per item: rows are stacked."""

    def batch(self, parts: Sequence[np.ndarray]) -> Any:
        """[items, ...] of items that look alike, else a list of their parts."""
        alike = all(part.shape == parts[0].shape for part in parts)
        return np.stack(parts) if alike else list(parts)


class MultiModalFlatField(msgspec.Struct, tag="flat", frozen=True):
    """Several rows of an array per item: rows are laid one after the other along `dim`."""

    dim: int = 0

    def batch(self, parts: Sequence[np.ndarray]) -> Any:
        """All rows."""
        return np.concatenate(parts, axis=self.dim)


class MultiModalSharedField(msgspec.Struct, tag="shared", frozen=True):
    """The same for all items."""

    batch_size: int = 1

    def batch(self, parts: Sequence[np.ndarray]) -> Any:
        """The first item's."""
        return parts[0]


MultiModalField: TypeAlias = MultiModalBatchedField | MultiModalFlatField | MultiModalSharedField


class MultiModalFieldElem(msgspec.Struct, eq=False):
    """One argument of `embed_multimodal` for one item, and how those of several items come together."""

    data: Any
    field: MultiModalField


class MultiModalKwargsItem(msgspec.Struct, eq=False):
    """What a processor made of one item: name of an argument -> its value. Reads like a dict."""

    elems: dict[str, MultiModalFieldElem] = msgspec.field(default_factory=dict)

    def __getitem__(self, name: str) -> MultiModalFieldElem:
        return self.elems[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.elems)

    def __len__(self) -> int:
        return len(self.elems)

    def keys(self) -> KeysView[str]:
        """Names of the arguments."""
        return self.elems.keys()

    def values(self) -> ValuesView[MultiModalFieldElem]:
        """Their values with their fields."""
        return self.elems.values()

    def items(self) -> ItemsView[str, MultiModalFieldElem]:
        """Both."""
        return self.elems.items()

    def get_data(self) -> dict[str, Any]:
        """Name of an argument -> its value."""
        return {name: elem.data for name, elem in self.elems.items()}

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        return sum(elem.data.nbytes for elem in self.elems.values() if isinstance(elem.data, np.ndarray))

    def as_batch(self) -> dict[str, Any]:
        """The arguments of `embed_multimodal` for this item alone; arrays of a batch of one."""
        return {
            name: elem.field.batch([elem.data]) if isinstance(elem.data, np.ndarray) else elem.data
            for name, elem in self.elems.items()
        }


class MultiModalKwargsItems(dict[str, list[MultiModalKwargsItem]]):
    """Modality -> what a processor made of its items."""

    @staticmethod
    def from_hf_inputs(
        hf_inputs: Mapping[str, Any], config_by_key: Mapping[str, MultiModalFieldConfig]
    ) -> MultiModalKwargsItems:
        """Cut a processor's outputs into items, as the fields say. ValueError where they do not fit each other."""
        items = MultiModalKwargsItems()
        for name, config in config_by_key.items():
            if name not in hf_inputs:
                continue
            elems = config.build_elems(hf_inputs[name])
            of_modality = items.setdefault(config.modality, [MultiModalKwargsItem() for _ in elems])
            if len(of_modality) != len(elems):
                raise ValueError(f"{name} is made for {len(elems)} items, not {len(of_modality)}")
            for item, elem in zip(of_modality, elems, strict=True):
                item.elems[name] = elem
        return items


class MultiModalFieldConfig(msgspec.Struct, frozen=True):
    """How one output of a processor is cut into items.

    slices  per item its rows; None = one row each
    """

    field: MultiModalField
    modality: str
    slices: tuple[slice, ...] | None = None

    @staticmethod
    def batched(modality: str) -> MultiModalFieldConfig:
        """A row per item."""
        return MultiModalFieldConfig(MultiModalBatchedField(), modality)

    @staticmethod
    def flat(modality: str, slices: Sequence[slice], dim: int = 0) -> MultiModalFieldConfig:
        """These rows per item."""
        return MultiModalFieldConfig(MultiModalFlatField(dim), modality, tuple(slices))

    @staticmethod
    def flat_from_sizes(modality: str, size_per_item: Any, dim: int = 0) -> MultiModalFieldConfig:
        """So many rows per item."""
        ends = np.cumsum([0, *(int(size) for size in size_per_item)])
        return MultiModalFieldConfig.flat(modality, [slice(int(a), int(b)) for a, b in pairwise(ends)], dim)

    @staticmethod
    def shared(modality: str, batch_size: int) -> MultiModalFieldConfig:
        """The same for each of `batch_size` items."""
        return MultiModalFieldConfig(MultiModalSharedField(batch_size), modality)

    def build_elems(self, batch: Any) -> list[MultiModalFieldElem]:
        """Cut an output into one part per item."""
        if isinstance(self.field, MultiModalSharedField):
            return [MultiModalFieldElem(plain(batch), self.field)] * self.field.batch_size
        if self.slices is None:
            return [MultiModalFieldElem(plain(row), self.field) for row in batch]
        lead = (slice(None),) * (self.field.dim if isinstance(self.field, MultiModalFlatField) else 0)
        whole = plain(batch)
        return [MultiModalFieldElem(whole[(*lead, rows)], self.field) for rows in self.slices]


def plain(value: Any) -> Any:
    """Tensors as arrays: nothing of torch leaves a processor."""
    if type(value).__module__ == "torch":
        value = value.detach().cpu()
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.asarray(value) if isinstance(value, np.generic) else value


class MultiModalFeatureSpec(msgspec.Struct, eq=False):
    """One item of a request.

    identifier   names its content (and how it was processed): equal items share what is computed of them
    mm_hash      the same, without what a connector may add
    """

    data: MultiModalKwargsItem | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


def mm_input(
    prompt_token_ids: list[int],
    mm_kwargs: Mapping[str, Sequence[MultiModalKwargsItem]],
    mm_hashes: Mapping[str, Sequence[str]],
    mm_placeholders: Mapping[str, Sequence[PlaceholderRange]],
    prompt: str | None = None,
    cache_salt: str | None = None,
) -> dict[str, Any]:
    """A prompt whose media are processed already."""
    made: dict[str, Any] = {
        "type": "multimodal",
        "prompt_token_ids": prompt_token_ids,
        "mm_kwargs": mm_kwargs,
        "mm_hashes": mm_hashes,
        "mm_placeholders": mm_placeholders,
    }
    if prompt is not None:
        made["prompt"] = prompt
    if cache_salt is not None:
        made["cache_salt"] = cache_salt
    return made


def features_of(given: Mapping[str, Any]) -> list[MultiModalFeatureSpec]:
    """The items of a prompt made by `mm_input`, in the order in which they stand."""
    features = [
        MultiModalFeatureSpec(item, modality, name, place, name)
        for modality, items in given["mm_kwargs"].items()
        for item, name, place in zip(
            items, given["mm_hashes"][modality], given["mm_placeholders"][modality], strict=True
        )
    ]
    return sorted(features, key=lambda feature: feature.mm_position.offset)


def media_of(features: Sequence[MultiModalFeatureSpec]) -> dict[str, Any]:
    """The part of a prompt dict that `features_of` reads."""
    made: dict[str, Any] = {"type": "multimodal", "mm_kwargs": {}, "mm_hashes": {}, "mm_placeholders": {}}
    for feature in features:
        made["mm_kwargs"].setdefault(feature.modality, []).append(feature.data)
        made["mm_hashes"].setdefault(feature.modality, []).append(feature.identifier)
        made["mm_placeholders"].setdefault(feature.modality, []).append(feature.mm_position)
    return made
