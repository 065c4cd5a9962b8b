"""The tokenizer inside a GGUF file: byte-level BPE or SentencePiece-style, with its control tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from hardpoint.errors import ModelFileError
from hardpoint.front_end.tokenizers.pretokenizers import WORD_KINDS
from hardpoint.front_end.tokenizers.tokenizer import TokenizerParts

_SPACE_MARK = "\u2581"
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "mask_token": "mask_token_id",
}
_END_IDS = ("eot_token_id", "eom_token_id")


class TokenKind(IntEnum):
    """What `tokenizer.ggml.token_type` says about a token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Fields:
    """Checked access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any], origin: str) -> None:
        self._metadata = metadata
        self._origin = origin

    def error(self, reason: str, fix: str = "") -> ModelFileError:
        return ModelFileError(
            f"the tokenizer in {self._origin} cannot be used: {reason}",
            code="tokenizer-gguf",
            fix=fix or "name another tokenizer with --tokenizer FOLDER",
        )

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"tokenizer.ggml.{name} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def items(self, name: str, kind: type, count: int | None = None) -> list[Any] | None:
        values = self.get(name, list)
        if values is None:
            return None
        if count is not None and len(values) != count:
            raise self.error(f"tokenizer.ggml.{name} has {len(values)} entries for {count} tokens")
        if not all(isinstance(value, kind) for value in values):
            raise self.error(f"tokenizer.ggml.{name} holds something that is no {kind.__name__}")
        return values


class _Vocabulary:
    """The token list and what each token is."""

    def __init__(self, fields: _Fields) -> None:
        tokens = fields.items("tokens", str)
        if not tokens:
            raise fields.error("the file has no token list")
        self.tokens: list[str] = tokens
        self.ids = {token: place for place, token in enumerate(tokens)}
        if len(self.ids) != len(tokens):
            twice = next(token for place, token in enumerate(tokens) if self.ids[token] != place)
            raise fields.error(f"token {twice!r} is listed twice")
        self.kinds: list[int] = fields.items("token_type", int, len(tokens)) or [TokenKind.NORMAL] * len(tokens)

    def of_kind(self, *kinds: TokenKind) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]


def tokenizer_from_gguf(metadata: Mapping[str, Any], origin: str) -> TokenizerParts:
    """Build the tokenizer a GGUF file describes.

    metadata  the file's keys, as `GGUFFile.metadata` has them
    origin    the file's name, for errors

    Raises `ModelFileError` for a damaged description or a kind of tokenizer that is not known.
    """
    fields = _Fields(metadata, origin)
    model = fields.get("model", str)
    vocabulary = _Vocabulary(fields)
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(fields, vocabulary)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(fields, vocabulary), True
    else:
        raise fields.error(
            f"its kind is {model!r}; known kinds are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        )
    _keep_whole(backend, vocabulary)
    special = _named_tokens(fields, vocabulary)
    _frame(
        backend,
        begin=special.get("bos_token") if fields.get("add_bos_token", bool, adds_bos) else None,
        end=special.get("eos_token") if fields.get("add_eos_token", bool, False) else None,
    )
    return TokenizerParts(
        backend=backend,
        origin=origin,
        special=special,
        end_token_ids=frozenset(_ids(fields, vocabulary, _END_IDS).values()),
        chat_templates=_chat_templates(metadata),
        config={"tokenizer_class": f"GGUF {model}", **special},
    )


def _byte_level_bpe(fields: _Fields, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = fields.get("pre", str, "default")
    kind = WORD_KINDS.get(name)
    if kind is None:
        raise fields.error(
            f"its way to cut words is {name!r}; known are {', '.join(sorted(WORD_KINDS))}",
        )
    backend = Tokenizer(_bpe(fields, vocabulary, _written_merges(fields), ignore_merges=kind.whole_words_first))
    backend.pre_tokenizer = kind.cut()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.adds_bos


def _written_merges(fields: _Fields) -> list[tuple[str, str]]:
    lines = fields.items("merges", str)
    if lines is None:
        raise fields.error("the file has no merges")
    merges = [tuple(line.split(" ")) for line in lines]
    wrong = next((line for line, merge in zip(lines, merges, strict=True) if len(merge) != 2), None)
    if wrong is not None:
        raise fields.error(f"merge {wrong!r} is not two tokens")
    return merges


def _sentencepiece(fields: _Fields, vocabulary: _Vocabulary) -> Tokenizer:
    scores = fields.items("scores", float, len(vocabulary.tokens))
    if scores is None:
        raise fields.error("the file has no scores")
    byte_tokens = bool(vocabulary.of_kind(TokenKind.BYTE))
    unknown = _ids(fields, vocabulary, ("unknown_token_id",)).get("unknown_token_id")
    backend = Tokenizer(
        _bpe(
            fields,
            vocabulary,
            merges_by_score(vocabulary.tokens, scores, _mergeable(vocabulary)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=byte_tokens,
        )
    )
    prefix = fields.get("add_space_prefix", bool, True)
    mark = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark]) if prefix else mark
    steps: list[Any] = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _mergeable(vocabulary: _Vocabulary) -> set[str]:
    """Tokens that text can become by merging; control and byte tokens only come from elsewhere."""
    return set(vocabulary.of_kind(TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNDEFINED, TokenKind.UNUSED))


def merges_by_score(tokens: list[str], scores: list[float], mergeable: set[str]) -> list[tuple[str, str]]:
    """Merges, best first, that build the tokens SentencePiece would.

    SentencePiece joins the neighbours whose joined token has the highest score. So each way to
    split a token into two tokens is a merge, ranked by the score of the whole.
    """
    ids = {token: place for place, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in mergeable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-scores[ids[token]], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _bpe(fields: _Fields, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as problem:  # the backend raises bare Exceptions
        raise fields.error(f"{problem}") from None


def _keep_whole(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are hidden and never cut; user-defined ones are shown and never cut."""
    control = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    # The backend would match a token with the space mark before the text's spaces have become marks.
    shown = [token for token in vocabulary.of_kind(TokenKind.USER_DEFINED) if _SPACE_MARK not in token]
    backend.add_special_tokens(_added(control, special=True))
    backend.add_tokens(_added(shown, special=False))


def _added(tokens: Iterable[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=special) for token in tokens if token]


def _ids(fields: _Fields, vocabulary: _Vocabulary, names: Iterable[str]) -> dict[str, int]:
    found = {name: fields.get(name, int) for name in names}
    # Some files name ids past the end for tokens they do not have.
    return {name: i for name, i in found.items() if i is not None and 0 <= i < len(vocabulary.tokens)}


def _named_tokens(fields: _Fields, vocabulary: _Vocabulary) -> dict[str, str]:
    ids = _ids(fields, vocabulary, _NAMED_IDS.values())
    return {name: vocabulary.tokens[ids[key]] for name, key in _NAMED_IDS.items() if key in ids}


def _frame(backend: Tokenizer, begin: str | None, end: str | None) -> None:
    """Let `add_special_tokens` put tokens around a text."""
    if begin is None and end is None:
        return
    frame = [*([begin] if begin else []), "$A", *([end] if end else [])]
    backend.post_processor = processors.TemplateProcessing(
        single=frame,
        special_tokens=[(token, backend.token_to_id(token)) for token in {begin, end} if token],
    )


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    base = "tokenizer.chat_template"
    named = {key[len(base) + 1 :]: text for key, text in metadata.items() if key.startswith(f"{base}.")}
    named["default"] = metadata.get(base)
    return {name: text for name, text in named.items() if isinstance(text, str)}
