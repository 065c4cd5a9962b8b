"""The tokenizer of a served model: text to ids and back, special tokens, chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import msgspec
import tokenizers

from hardpoint.front_end.tokenizers.chat_template import render_chat
from hardpoint.front_end.tokenizers.pieces import PieceTable, piece_table, special_ids


@runtime_checkable
class TokenizerLike(Protocol):
    """What the rest of the server and plugins may expect of any tokenizer."""

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a sequence."""
        ...

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a sequence."""
        ...

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        ...

    @property
    def max_token_id(self) -> int:
        """Largest id that has a token."""
        ...

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens."""
        ...

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens."""
        ...

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Text of ids."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """Tokens as the vocabulary writes them."""
        ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        """Ids of tokens as the vocabulary writes them."""
        ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens as the vocabulary writes them."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> str:
        """A conversation as the text the model was trained on."""
        ...


def _never_shortens(normalizer: Mapping[str, Any]) -> bool:
    """Whether a normaliser, as the backend describes it, only adds characters or exchanges them."""
    if normalizer["type"] == "Sequence":
        return all(map(_never_shortens, normalizer["normalizers"]))
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(normalizer["content"])
    return normalizer["type"] == "Prepend"


@dataclass
class TokenizerParts:
    """What a model folder or file says about its tokenizer.

    special         `bos_token`, `eos_token`, `unk_token`, `pad_token` ... -> token text
    end_token_ids   ids that end an answer beside `eos_token` (end of turn, end of message)
    chat_templates  name -> jinja text; the one used unless told otherwise is `default`
    config          the tokenizer's own settings, for `/tokenizer_info`
    """

    backend: tokenizers.Tokenizer
    origin: str
    special: dict[str, str] = field(default_factory=dict)
    end_token_ids: frozenset[int] = frozenset()
    chat_templates: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Tokenizer:
    """A fast tokenizer with vLLM's method names; `backend` is the `tokenizers` object."""

    is_fast = True
    truncation_side = "left"

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.name_or_path = parts.origin
        self.special_tokens_map = parts.special
        self.end_token_ids = parts.end_token_ids
        self.chat_templates = parts.chat_templates
        self.init_kwargs = parts.config
        self.special_ids = special_ids(parts.backend)
        self.pieces: PieceTable | None = piece_table(parts.backend)

    # -- ids of named tokens -------------------------------------------------------------------

    def _named(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def bos_token_id(self) -> int | None:
        """Id that begins a sequence; None when the model has none."""
        return self._named("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """Id that ends a sequence; None when the model has none."""
        return self._named("eos_token")

    @cached_property
    def pad_token_id(self) -> int | None:
        """Id that fills; None when the model has none."""
        return self._named("pad_token")

    @cached_property
    def unk_token_id(self) -> int | None:
        """Id for what the vocabulary cannot write; None when the model has none."""
        return self._named("unk_token")

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self.special_tokens_map.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the token that fills."""
        return self.special_tokens_map.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        """Text of the token for what the vocabulary cannot write."""
        return self.special_tokens_map.get("unk_token")

    # -- the vocabulary ------------------------------------------------------------------------

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    @cached_property
    def max_token_id(self) -> int:
        """Largest id that has a token."""
        return max(self.get_vocab().values(), default=-1)

    @cached_property
    def max_chars_per_token(self) -> int:
        """Characters of the longest token, an upper bound for the text one token can stand for."""
        return max(map(len, self.get_vocab()), default=1)

    @cached_property
    def keeps_characters(self) -> bool:
        """Whether no normaliser may make a text shorter before it is tokenised."""
        normalizer = self.backend.normalizer
        return normalizer is None or _never_shortens(msgspec.json.decode(normalizer.__getstate__()))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens, in order."""
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens, in the order of their ids."""
        added = self.backend.get_added_tokens_decoder()
        return [added[token_id].content for token_id in self.all_special_ids]

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab(self) -> dict[str, int]:
        """Same as `get_vocab()`."""
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """Added token -> id."""
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}

    def num_special_tokens_to_add(self) -> int:
        """How many tokens `encode` puts around a text."""
        return self.backend.num_special_tokens_to_add(is_pair=False)

    # -- text to ids ---------------------------------------------------------------------------

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        """Ids of a text; special tokens written in it become one id each.

        Raises UnicodeEncodeError for a text with half a surrogate pair.
        """
        # Checked here because the backend's own complaint is a TypeError without a reason.
        text.encode("utf-8")
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if max_length is None or truncation is False or len(ids) <= max_length:
            return ids
        return ids[-max_length:] if self.truncation_side == "left" else ids[:max_length]

    def encode_pair(self, first: str, second: str, max_length: int | None = None) -> tuple[list[int], list[int]]:
        """Ids of two texts read together, and for each 0 or 1: which text the model takes it for.

        max_length  more ids are taken from the end of the longer text
        Raises UnicodeEncodeError for a text with half a surrogate pair.
        """
        first.encode("utf-8")
        second.encode("utf-8")
        both = self.backend.encode(first, second, add_special_tokens=True)
        if max_length is not None and len(both.ids) > max_length:
            alone = [self.backend.encode(text, add_special_tokens=False) for text in (first, second)]
            keep = [len(one.ids) for one in alone]
            for _ in range(len(both.ids) - max_length):
                keep[keep[0] < keep[1]] -= 1
            texts = [text[: one.offsets[count - 1][1] if count > 0 else 0]
                     for text, one, count in zip((first, second), alone, keep, strict=True)]  # fmt: skip
            both = self.backend.encode(texts[0], texts[1], add_special_tokens=True)
        return both.ids[:max_length], both.type_ids[:max_length]

    def cut_text(self, text: str, most: int, side: str = "right") -> str:
        """`most` tokens of a text, special tokens left aside; `side` says where the rest is cut off."""
        text.encode("utf-8")
        found = self.backend.encode(text, add_special_tokens=False)
        if len(found.ids) <= most:
            return text
        return text[found.offsets[-most][0] :] if side == "left" else text[: found.offsets[most - 1][1]]

    def encode_chat(self, rendered: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered conversation, never with a second token that begins the sequence."""
        ids = self.encode(rendered, add_special_tokens=add_special_tokens)
        bos = self.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def __call__(self, text: str | list[str], add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of one text or of several."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    # -- ids to text ---------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Text of ids; ids without a token stand for nothing, broken UTF-8 for U+FFFD."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if self.pieces is None:
            return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if skip_special_tokens:
            ids = [token_id for token_id in ids if token_id not in self.special_ids]
        return self.pieces.join(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, as bytes: possibly a part of a character."""
        if self.pieces is None:
            return self.decode([token_id]).encode("utf-8", "replace")
        return self.pieces[token_id]

    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """Tokens as the vocabulary writes them; empty for an id without a token."""
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return [self.backend.id_to_token(token_id) or "" for token_id in ids if token_id not in hidden]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Ids of tokens as the vocabulary writes them; the unknown token's id (or None) for others."""
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of tokens as the vocabulary writes them."""
        decoder = self.backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    # -- conversations -------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The model's own template; None when it has none."""
        return self.chat_templates.get("default")

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str | None:
        """The template to use: a given one (by its text or by name), else the model's for the case."""
        if chat_template is not None:
            return self.chat_templates.get(chat_template, chat_template)
        if tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        return self.chat_template

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        documents: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to text. `kwargs` reach the template.

        Raises `VLLMValidationError` when there is no template or it refuses the conversation.
        """
        variables: Mapping[str, Any] = {**self.special_tokens_map, **kwargs}
        return render_chat(
            self.get_chat_template(chat_template, tools),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
