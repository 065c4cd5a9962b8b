"""The forms a prompt may have. A plain string and a list of token ids are prompts too."""

from __future__ import annotations

from typing import Any, NotRequired, TypeAlias, TypedDict


class _PromptOptions(TypedDict):
    multi_modal_data: NotRequired[dict[str, Any] | None]
    media_io_kwargs: NotRequired[dict[str, dict[str, Any]] | None]
    mm_processor_kwargs: NotRequired[dict[str, Any] | None]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TextPrompt(_PromptOptions):
    """Text to tokenise."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """Token ids, and the text they came from where it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    prompt_token_offsets: NotRequired[list[tuple[int, int]] | None]


class EmbedsPrompt(_PromptOptions):
    """Embeddings [tokens, hidden] in place of ids."""

    prompt_embeds: Any
    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    prompt_is_token_ids: NotRequired[list[bool]]


class DataPrompt(TypedDict):
    """A payload only an IO processor understands."""

    data: Any
    data_format: str


SingletonPrompt: TypeAlias = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType: TypeAlias = SingletonPrompt
