"""The bytes each token stands for, found from how a tokenizer joins its tokens into text.

Text is bytes first and characters second: a token may hold a part of a UTF-8 character, so pieces
are joined as bytes and decoded once. Tokenizers whose text cannot be had by joining bytes (word
pieces, for example) have no piece table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
# Decoder steps that leave the bytes of a piece alone.
_NEUTRAL = {"Fuse"}


def _byte_level_alphabet() -> dict[int, int]:
    # Byte-level BPE writes each byte as one visible character: printable Latin-1 stands for itself,
    # the rest for the characters from U+0100 on.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {code: code for code in visible}
    hidden = (byte for byte in range(256) if byte not in alphabet.values())
    alphabet.update({0x100 + place: byte for place, byte in enumerate(list(hidden))})
    return alphabet


_FROM_VISIBLE = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; one with foreign characters stands for itself."""
    try:
        return bytes([_FROM_VISIBLE[ord(character)] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class PieceTable:
    """Token id -> bytes, worked out on first use of each id.

    leading_spaces  how many spaces the decoder takes from the start of a text (SentencePiece's
                    dummy prefix); 0 for byte-level tokenizers
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        byte_level: bool,
        space_mark: str = _SPACE_MARK,
        byte_tokens: bool = False,
        leading_spaces: int = 0,
    ) -> None:
        self._token_of = backend.id_to_token
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._special = special_ids(backend)
        self._byte_level = byte_level
        self._space_mark = space_mark
        self._byte_tokens = byte_tokens
        self.leading_spaces = leading_spaces
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id outside the vocabulary."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._work_out(token_id)
        return piece

    def _work_out(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            plain = self._byte_level or token_id in self._special
            return (added if plain else added.replace(self._space_mark, " ")).encode("utf-8", "replace")
        token = self._token_of(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            return byte_level_bytes(token)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        return token.replace(self._space_mark, " ").encode("utf-8", "replace")

    def join(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become replacement characters."""
        text = b"".join([self[token_id] for token_id in token_ids]).decode("utf-8", "replace")
        taken = 0
        while taken < self.leading_spaces and text[taken : taken + 1] == " ":
            taken += 1
        return text[taken:]


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the added tokens marked special, which `skip_special_tokens` hides."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def piece_table(backend: tokenizers.Tokenizer) -> PieceTable | None:
    """The table for a tokenizer, or None where joining bytes would not give its text."""
    decoder = backend.decoder
    if decoder is None:
        return None
    state: dict[str, Any] = msgspec.json.decode(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    steps = [step for step in steps if step["type"] not in _NEUTRAL]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(backend, byte_level=True)
    if kinds == ["Metaspace"]:
        return PieceTable(
            backend,
            byte_level=False,
            space_mark=steps[0]["replacement"],
            leading_spaces=0 if steps[0].get("prepend_scheme") == "never" else 1,
        )
    return _sentencepiece(backend, steps)


def _sentencepiece(backend: tokenizers.Tokenizer, steps: list[Mapping[str, Any]]) -> PieceTable | None:
    mark, byte_tokens, leading = None, False, 0
    for step in steps:
        if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            mark = step["pattern"]["String"]
        elif step["type"] == "ByteFallback":
            byte_tokens = True
        elif step["type"] == "Strip" and step["content"] == " " and not step["stop"]:
            leading = step["start"]
        else:
            return None
    if mark is None:
        return None
    return PieceTable(backend, byte_level=False, space_mark=mark, byte_tokens=byte_tokens, leading_spaces=leading)
