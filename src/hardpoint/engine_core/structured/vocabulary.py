"""The vocabulary as grammars need it: the bytes of every token, without a tokenizer where none is asked."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.extensions.refs import load_ref
from hardpoint.types.messages import TokenTable

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig

# The front end's: a reference, since roles do not import each other.
_GET_TOKENIZER = "hardpoint.front_end.tokenizers:get_tokenizer"


def read_vocabulary(model_config: ModelConfig) -> GrammarTokenizer:
    """The served model's vocabulary; a tokenizer that cannot be read raises ModelFileError."""
    tokenizer = load_ref(_GET_TOKENIZER)(model_config)
    return GrammarTokenizer(model_config, _table(tokenizer, model_config), tokenizer)


def _table(tokenizer: Any, model_config: ModelConfig) -> TokenTable:
    size = model_config.get_vocab_size() or tokenizer.max_token_id + 1
    special = frozenset(tokenizer.special_ids)
    texts = [token for token in range(min(size, tokenizer.max_token_id + 1)) if token not in special]
    pieces = [b""] * size
    for token in texts:
        pieces[token] = tokenizer.token_bytes(token)
    return TokenTable(
        pieces=pieces,
        special_ids=sorted(token for token in special if token < size),
        eos_token_id=tokenizer.eos_token_id,
    )


class GrammarTokenizer:
    """What backends get as their tokenizer: a token table, and the whole tokenizer if they ask for more."""

    def __init__(self, model_config: ModelConfig, table: TokenTable, whole: Any = None) -> None:
        self._model_config = model_config
        self.table = table
        self._is_whole = whole is not None
        if whole is not None:
            self.whole = whole

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a sequence; None when the model has none."""
        return self.table.eos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(self.table.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; nothing for special tokens and for ids without a token."""
        pieces = self.table.pieces
        return pieces[token_id] if 0 <= token_id < len(pieces) else b""

    @cached_property
    def whole(self) -> Any:
        """The model's tokenizer."""
        return load_ref(_GET_TOKENIZER)(self._model_config)

    def token_of(self, piece: bytes) -> int | None:
        """The token of a piece of text; None when there is none."""
        return self._by_piece.get(piece)

    def encode_bytes(self, text: bytes) -> list[int]:
        """Tokens of a text: as the model's tokenizer cuts it if that is loaded, else the longest that fit."""
        if self._is_whole:
            return self.whole.encode(text.decode("utf-8", "ignore"), add_special_tokens=False)
        tokens, start, longest = [], 0, max(map(len, self._by_piece), default=1)
        while start < len(text):
            for end in range(min(len(text), start + longest), start, -1):
                token = self._by_piece.get(text[start:end])
                if token is not None:
                    tokens.append(token)
                    break
            else:
                end = start + 1
            start = end
        return tokens

    @cached_property
    def _by_piece(self) -> dict[bytes, int]:
        pieces = self.table.pieces
        return {pieces[token]: token for token in reversed(range(len(pieces))) if pieces[token]}

    def __len__(self) -> int:
        return len(self.table.pieces)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)
