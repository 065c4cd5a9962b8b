"""What a request may ask by a documented field and this server does not have: refused by name.

Fields that reach SamplingParams are refused by the input processor, which knows the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hardpoint.errors import VLLMValidationError


class Refusal(NamedTuple):
    """A field, the values that are harmless, and why the rest is refused."""

    field: str
    harmless: Callable[[Any], bool]
    reason: str


def _unset(value: Any) -> bool:
    return not value


_NO_MEDIA = "pooling takes text only"
_RENDER_ONLY = "it belongs to the render routes, which this server does not have"

# fmt: off
SHARED = (
    Refusal("use_beam_search", _unset, "beam search is not available"),
    Refusal("length_penalty", lambda v: v == 1.0, "it only concerns beam search, which is not available"),
    Refusal("return_token_offsets", _unset, _RENDER_ONLY),
    Refusal("mm_payload", lambda v: v == "tensors", _RENDER_ONLY),
    Refusal("return_mm_kwargs", _unset, _RENDER_ONLY),
)
COMPLETIONS = (
    *SHARED,
    Refusal("prompt_embeds", lambda v: v is None, "prompt embeddings are not available"),
    Refusal("suffix", _unset, "the model has no fill-in-the-middle template"),
)
CHAT = SHARED
POOLING = (
    Refusal("mm_processor_kwargs", _unset, _NO_MEDIA),
    Refusal("padding", lambda v: v in (None, "do_not_pad"), "prompts are not padded here, and need not be"),
)
POOLING_INPUT = (*POOLING, Refusal("media_io_kwargs", _unset, _NO_MEDIA))
COMPARISON = (
    *POOLING,
    Refusal("instruction", _unset, "there are no templates for pairs of texts"),
    Refusal("chat_template_kwargs", _unset, "there are no templates for pairs of texts"),
)
TOKENIZE_CHAT: tuple[Refusal, ...] = ()
# fmt: on

# OpenAI fields outside the documented ones whose silent loss would change what the client gets.
_FOREIGN: dict[str, Callable[[Any], bool]] = {
    "modalities": lambda v: v in (None, ["text"]),
    "audio": _unset,
    "best_of": lambda v: v in (None, 1),
    "functions": _unset,
    "function_call": lambda v: v in (None, "none"),
    "web_search_options": lambda v: v is None,
    "prediction": _unset,
}


def refuse_unsupported(request: Any, table: tuple[Refusal, ...]) -> None:
    """Raise VLLMValidationError for the first field that asks for what we do not have."""
    for field, harmless, reason in table:
        if not harmless(getattr(request, field)):
            raise VLLMValidationError(f"{field} is not supported by this server: {reason}", parameter=field)
    for field, value in (request.__pydantic_extra__ or {}).items():
        known = _FOREIGN.get(field)
        if known is not None and not known(value):
            raise VLLMValidationError(f"{field} is not supported by this server", parameter=field)
