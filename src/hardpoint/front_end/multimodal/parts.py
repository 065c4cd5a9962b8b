"""Media in chat messages: which parts they are, where they stand, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.multimodal.fetch import MediaFetcher
from hardpoint.front_end.multimodal.images import as_image, read_image, too_bad

# Kinds of parts -> their modality.
IMAGE_PARTS = {"image_url": "image", "input_image": "image", "image_pil": "image"}
_OTHER_MEDIA = ("input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "video_embeds")
_THREADS = 16


@dataclass
class MediaPart:
    """One item of a conversation.

    where  the part's place in the request, for errors
    mark   what stands for it in a text
    """

    modality: str
    where: str
    part: Mapping[str, Any]
    mark: str


@dataclass
class MediaParts:
    """Collects the media of a conversation while its messages are brought into the template's form.

    placeholder  (modality, number from 1) -> what stands for an item in a text, None for media that are not taken;
                 None = the model takes none at all
    interleave   keep items between the texts of a message; else they come before them
    limit        modality -> items one prompt may have
    """

    placeholder: Callable[[str, int], str | None] | None = None
    interleave: bool = False
    limit: Callable[[str], int] = lambda modality: 0
    found: list[MediaPart] = field(default_factory=list)

    def knows(self, part: Any) -> bool:
        """Whether a part of a message is an item of media."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        return isinstance(kind, str) and (kind in IMAGE_PARTS or kind in _OTHER_MEDIA)

    def take(self, part: Mapping[str, Any], where: str) -> MediaPart:
        """Note an item. VLLMValidationError where the model does not take it, or no more of it."""
        kind = part["type"]
        if self.placeholder is None:
            raise VLLMValidationError(
                f"content parts of type {kind!r} are not supported: this model reads text", parameter=where
            )
        if part.get("uuid") is not None:
            raise VLLMValidationError(
                "names for media are not taken: an item is known by its content, and another caller's never shown",
                parameter=f"{where}.uuid",
            )
        modality = IMAGE_PARTS.get(kind)
        before = sum(one.modality == modality for one in self.found)
        mark = None if modality is None else self.placeholder(modality, before + 1)
        if modality is None or mark is None:
            raise VLLMValidationError(f"content parts of type {kind!r} are not supported", parameter=where)
        most = self.limit(modality)
        if before >= most:
            raise VLLMValidationError(f"At most {most} {modality}(s) may be provided in one prompt.", parameter=where)
        taken = MediaPart(modality, where, part, mark)
        self.found.append(taken)
        return taken

    def text_of(self, pieces: Sequence[str | MediaPart], where: str) -> str:
        """A message's pieces as one text, with placeholders for the items.

        A text may have the placeholders itself, to say where the items stand.
        """
        texts = [piece for piece in pieces if isinstance(piece, str)]
        marks = [piece.mark for piece in pieces if isinstance(piece, MediaPart)]
        missing = list(marks)
        for mark in dict.fromkeys(marks):
            stated = sum(text.count(mark) for text in texts)
            if stated > marks.count(mark):
                raise VLLMValidationError(
                    f"the message has {stated} placeholders {mark!r} and {marks.count(mark)} items", parameter=where
                )
            for _ in range(stated):
                missing.remove(mark)
        if self.interleave and missing == marks:
            return "\n".join(piece if isinstance(piece, str) else piece.mark for piece in pieces)
        return "\n".join([*missing, *texts])


class MediaReader:
    """Reads the items of a conversation, several at once."""

    def __init__(self, fetcher: MediaFetcher, options: Mapping[str, Mapping[str, Any]]) -> None:
        self._fetcher = fetcher
        self._options = options

    def read(
        self, parts: Sequence[MediaPart], options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, list[Any]]:
        """Modality -> items, in their order.

        options  the request's own, by modality
        VLLMValidationError naming the part that cannot be read.
        """
        merged = {**self._options, **(options or {})}
        if len(parts) == 1:
            found = [self._read(parts[0], merged)]
        else:
            # The first that is bad is the answer; the others are left to end by themselves.
            found = list(_pool().map(lambda part: self._read(part, merged), parts))
        items: dict[str, list[Any]] = {}
        for part, item in zip(parts, found, strict=True):
            items.setdefault(part.modality, []).append(item)
        return items

    def _read(self, part: MediaPart, options: Mapping[str, Mapping[str, Any]]) -> Any:
        kind = part.part["type"]
        try:
            if kind == "image_pil":
                return as_image(part.part.get("image_pil"), options.get("image"))
            data = self._fetcher.fetch(_url(part.part), float(envs.VLLM_IMAGE_FETCH_TIMEOUT))
            return read_image(data, options.get("image"))
        except ValueError as error:
            if isinstance(error, VLLMValidationError):
                raise
            raise too_bad("the image", part.where, error) from None


def _url(part: Mapping[str, Any]) -> str:
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise ValueError("the part needs a URL, as image_url.url")
    return url


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for other servers."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="media")


@cache
def processing_threads() -> ThreadPoolExecutor:
    """Threads that prepare prompts with media, and wait for those above."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="media-prompts")
