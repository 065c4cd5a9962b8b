"""What callers may give as a prompt, and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import VLLMValidationError
from hardpoint.types.multimodal import MultiModalFeatureSpec, features_of, media_of

# Keys of prompt dicts, by what they mean here.
_READ = {"prompt", "prompt_token_ids", "cache_salt"}
# Those that `read_media` reads.
_MEDIA = {"multi_modal_data", "mm_processor_kwargs", "media_io_kwargs", "mm_kwargs", "mm_hashes", "mm_placeholders"}
# Facts about the prompt that change nothing in how it is run.
_IGNORED = {"type", "arrival_time", "prompt_token_offsets"}
_REFUSED = {
    "prompt_embeds": "prompt embeddings",
    "prompt_is_token_ids": "prompt embeddings",
    "multi_modal_uuids": "names of media, which are named by their content,",
    "encoder_prompt": "encoder-decoder prompts",
    "decoder_prompt": "encoder-decoder prompts",
    "token_type_ids": "segment ids",
    "data": "prompts for an IO processor",
    "data_format": "prompts for an IO processor",
}


@dataclass
class TokenPrompt:
    """A prompt the engine can run.

    text      what the ids were made from; None for a prompt given as ids
    features  its media, in the order in which they stand
    """

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    features: list[MultiModalFeatureSpec] | None = None

    def for_engine(self) -> dict[str, Any]:
        """The prompt as a dict that `read_prompt` and `read_media` read."""
        given: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if self.text is not None:
            given["prompt"] = self.text
        if self.cache_salt is not None:
            given["cache_salt"] = self.cache_salt
        return given if self.features is None else {**given, **media_of(self.features)}


@dataclass
class PromptMedia:
    """The media of a prompt: those to be processed, or those that are.

    data               modality -> item or list of items
    processor_options  the prompt's own options for the model's processor
    io_options         the same for reading items
    """

    data: Mapping[str, Any]
    processor_options: Mapping[str, Any]
    io_options: Mapping[str, Any]
    features: list[MultiModalFeatureSpec] | None = None


def read_media(prompt: Any) -> PromptMedia | None:
    """The media of a prompt of any kind; None for a prompt without."""
    if not isinstance(prompt, Mapping):
        return None
    if prompt.get("mm_kwargs"):
        return PromptMedia({}, {}, {}, features_of(prompt))
    parts = []
    for name in ("multi_modal_data", "mm_processor_kwargs", "media_io_kwargs"):
        value = prompt.get(name) or {}
        if not isinstance(value, Mapping):
            raise VLLMValidationError(f"{name} must be a dict", parameter=name)
        parts.append(value)
    data = {modality: items for modality, items in parts[0].items() if items is not None}
    return PromptMedia(data, parts[1], parts[2]) if data else None


@dataclass
class Tokenization:
    """How a text becomes ids, and how ids are cut.

    truncate_prompt_tokens  keep this many ids; -1 = as many as leave room for the answer
    truncation_side         which end is cut off
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    @classmethod
    def of(cls, kwargs: Mapping[str, Any] | None) -> Tokenization:
        """From `tokenization_kwargs`; refuses what it does not know."""
        kwargs = kwargs or {}
        unknown = sorted(kwargs.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise VLLMValidationError(
                f"tokenization_kwargs {', '.join(unknown)} are not supported; known are "
                f"{', '.join(cls.__dataclass_fields__)}",
                parameter="tokenization_kwargs",
            )
        return cls(**kwargs)

    def cut(self, token_ids: list[int], room: int, context: int) -> list[int]:
        """The ids that are kept.

        room     what -1 stands for
        context  the most that may be asked for
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if not isinstance(keep, int) or keep == 0 or not -1 <= keep <= context:
            raise VLLMValidationError(
                f"truncate_prompt_tokens must be -1 or in [1, {context}], got {keep!r}",
                parameter="truncate_prompt_tokens",
                value=keep,
            )
        keep = room if keep == -1 else keep
        if self.truncation_side not in (None, "left", "right"):
            raise VLLMValidationError(
                f"truncation_side must be left or right, got {self.truncation_side!r}", parameter="truncation_side"
            )
        if len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if self.truncation_side == "right" else token_ids[-keep:]


def read_prompt(prompt: Any) -> tuple[str | None, list[int] | None, str | None]:
    """Split a prompt of any kind into text, ids and cache salt.

    Raises `VLLMValidationError` naming what is not supported.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if isinstance(prompt, list | tuple):
        return None, _ids(prompt), None
    if isinstance(prompt, Mapping):
        return _read_mapping(prompt)
    raise VLLMValidationError(
        f"a prompt must be text, a list of token ids or a prompt dict, not {type(prompt).__name__}", parameter="prompt"
    )


def _read_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, list[int] | None, str | None]:
    for key, value in prompt.items():
        if key in _READ or key in _IGNORED or key in _MEDIA:
            continue
        if key not in _REFUSED:
            raise VLLMValidationError(f"prompt key {key!r} is not known", parameter=key)
        if value is not None and value != {} and value != []:
            raise VLLMValidationError(f"{_REFUSED[key]} are not supported by this version", parameter=key)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise VLLMValidationError("prompt must be text", parameter="prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise VLLMValidationError("cache_salt must be a non-empty text", parameter="cache_salt")
    if text is None and ids is None:
        raise VLLMValidationError("a prompt dict needs prompt or prompt_token_ids", parameter="prompt")
    return text, None if ids is None else _ids(ids), salt


def _ids(values: Any) -> list[int]:
    try:
        # Also numpy integers and arrays: anything that is a whole number by itself.
        return [value.__index__() for value in values]
    except (AttributeError, TypeError):
        raise VLLMValidationError("a prompt of token ids must hold integers", parameter="prompt_token_ids") from None
