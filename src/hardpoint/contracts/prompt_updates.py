"""Where media stand in a prompt: what a processor wants replaced or inserted, and how that is done to token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from hardpoint.errors import VLLMValidationError
from hardpoint.types.multimodal import PlaceholderRange

PromptSeq: TypeAlias = str | list[int]


class UpdateMode(Enum):
    """What an update does with its target."""

    INSERT = "insert"
    REPLACE = "replace"


@dataclass(frozen=True)
class PromptIndex:
    """A place instead of a text: `at` finds it in the token ids."""

    at: Callable[[Sequence[int]], int]


class PromptIndexTargets:
    """Places that are always there."""

    @staticmethod
    def start() -> PromptIndex:
        """Before everything."""
        return PromptIndex(lambda ids: 0)

    @staticmethod
    def end() -> PromptIndex:
        """After everything."""
        return PromptIndex(len)

    @staticmethod
    def prefix(seq: list[int]) -> PromptIndex:
        """Behind these ids where the prompt begins with them, else before everything."""
        return PromptIndex(lambda ids: len(seq) if list(ids[: len(seq)]) == seq else 0)


@dataclass(frozen=True)
class PromptUpdateDetails:
    """What a place is filled with.

    full      text or token ids
    is_embed  (tokenizer, token ids) -> which of them get an embedding, as bools; None = all
    """

    full: PromptSeq
    is_embed: Callable[[Any, list[int]], Any] | None = None

    @staticmethod
    def from_seq(seq: PromptSeq) -> PromptUpdateDetails:
        """Every token gets an embedding."""
        return PromptUpdateDetails(seq)

    @staticmethod
    def select_token_id(seq: PromptSeq, embed_token_id: int) -> PromptUpdateDetails:
        """Only this token gets embeddings."""
        return PromptUpdateDetails(seq, lambda tokenizer, ids: np.asarray(ids) == embed_token_id)

    @staticmethod
    def select_token_ids(seq: PromptSeq, embed_token_ids: list[int]) -> PromptUpdateDetails:
        """Only these tokens get embeddings."""
        return PromptUpdateDetails(seq, lambda tokenizer, ids: np.isin(ids, embed_token_ids))

    @staticmethod
    def select_text(seq: PromptSeq, embed_text: str) -> PromptUpdateDetails:
        """Only the tokens of this text get embeddings."""
        return PromptUpdateDetails(
            seq, lambda tokenizer, ids: np.isin(ids, tokenizer.encode(embed_text, add_special_tokens=False))
        )


Target: TypeAlias = PromptSeq | PromptIndex
Content: TypeAlias = PromptSeq | PromptUpdateDetails


@dataclass(frozen=True)
class PromptUpdate:
    """An update per item of a modality; `target` and `content` may be functions of the item's number."""

    modality: str
    target: Target | Callable[[int], Target]

    @property
    def content(self) -> Content | Callable[[int], Content]:
        """What is put there."""
        raise NotImplementedError

    @property
    def mode(self) -> UpdateMode:
        """Whether the target goes."""
        raise NotImplementedError

    def target_of(self, item: int) -> Target:
        """The target for an item."""
        return self.target(item) if callable(self.target) else self.target

    def content_of(self, item: int) -> PromptUpdateDetails:
        """The content for an item."""
        content = self.content(item) if callable(self.content) else self.content
        return content if isinstance(content, PromptUpdateDetails) else PromptUpdateDetails(content)


@dataclass(frozen=True)
class PromptInsertion(PromptUpdate):
    """Put something behind the target."""

    insertion: Content | Callable[[int], Content] = field(repr=False)

    @property
    def content(self) -> Content | Callable[[int], Content]:
        """What is put there."""
        return self.insertion

    @property
    def mode(self) -> UpdateMode:
        """The target stays."""
        return UpdateMode.INSERT


@dataclass(frozen=True)
class PromptReplacement(PromptUpdate):
    """Put something in the target's place."""

    replacement: Content | Callable[[int], Content] = field(repr=False)

    @property
    def content(self) -> Content | Callable[[int], Content]:
        """What is put there."""
        return self.replacement

    @property
    def mode(self) -> UpdateMode:
        """The target goes."""
        return UpdateMode.REPLACE


def apply_updates(
    ids: list[int], updates: Sequence[PromptUpdate], counts: Mapping[str, int], tokenizer: Any
) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
    """Do every item's update; returns the new ids and where each item stands.

    The items of a modality find their targets in order. VLLMValidationError when a target is missing, or when one
    is left over that no item belongs to.
    """
    edits: list[tuple[int, int, str, int, PromptUpdateDetails]] = []
    for modality, count in counts.items():
        offered = [update for update in updates if update.modality == modality]
        begin = 0
        for item in range(count):
            found = _find(ids, begin, offered, item, tokenizer)
            if found is None:
                raise _mismatch(modality, item, count)
            place, length, update = found
            drop = length if update.mode is UpdateMode.REPLACE else 0
            edits.append((place + length - drop, drop, modality, item, update.content_of(item)))
            begin = place + length
        if count and _has_more(ids, begin, offered, tokenizer):
            raise VLLMValidationError(
                f"the prompt has more {modality} placeholders than the {count} {modality}(s) given",
                parameter="prompt",
            )
    return _edited(ids, sorted(edits, key=lambda edit: edit[0]), tokenizer)


def _mismatch(modality: str, found: int, count: int) -> VLLMValidationError:
    return VLLMValidationError(
        f"the prompt has {found} {modality} placeholder(s) and {count} {modality}(s) were given", parameter="prompt"
    )


def _find(
    ids: list[int], begin: int, updates: Sequence[PromptUpdate], item: int, tokenizer: Any
) -> tuple[int, int, PromptUpdate] | None:
    """The first target of an item at or behind `begin`: its place, its length, its update."""
    best: tuple[int, int, PromptUpdate] | None = None
    for update in updates:
        target = update.target_of(item)
        if isinstance(target, PromptIndex):
            found: tuple[int, int] | None = (target.at(ids), 0)
        else:
            found = _search(ids, begin, as_ids(target, tokenizer))
        if found is not None and (best is None or found[0] < best[0]):
            best = (*found, update)
    return best


def _has_more(ids: list[int], begin: int, updates: Sequence[PromptUpdate], tokenizer: Any) -> bool:
    targets = [update.target_of(0) for update in updates if update.mode is UpdateMode.REPLACE]
    return any(
        _search(ids, begin, as_ids(target, tokenizer)) is not None
        for target in targets
        if not isinstance(target, PromptIndex)
    )


def _search(ids: list[int], begin: int, wanted: list[int]) -> tuple[int, int] | None:
    if not wanted:
        return None
    place = begin
    while True:
        try:
            place = ids.index(wanted[0], place)
        except ValueError:
            return None
        if ids[place : place + len(wanted)] == wanted:
            return place, len(wanted)
        place += 1


def as_ids(seq: PromptSeq, tokenizer: Any) -> list[int]:
    """A text or ids as ids."""
    return tokenizer.encode(seq, add_special_tokens=False) if isinstance(seq, str) else list(seq)


def _edited(
    ids: list[int], edits: Sequence[tuple[int, int, str, int, PromptUpdateDetails]], tokenizer: Any
) -> tuple[list[int], dict[str, list[PlaceholderRange]]]:
    out: list[int] = []
    places: dict[str, dict[int, PlaceholderRange]] = {}
    done = 0
    for place, drop, modality, item, content in edits:
        out += ids[done:place]
        filling = as_ids(content.full, tokenizer)
        mask = None if content.is_embed is None else np.asarray(content.is_embed(tokenizer, filling), dtype=bool)
        places.setdefault(modality, {})[item] = PlaceholderRange(len(out), len(filling), mask)
        out += filling
        done = place + drop
    out += ids[done:]
    return out, {modality: [found[item] for item in sorted(found)] for modality, found in places.items()}
