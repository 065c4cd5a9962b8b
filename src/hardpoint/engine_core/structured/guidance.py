"""The backend `guidance`: llguidance, which derives masks from a lexer and an Earley parser as it goes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from hardpoint.contracts.structured_output import (
    GrammarError,
    JsonStyle,
    MalformedConstraint,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.engine_core.structured.schema import OTHER_FORMATS, SchemaRules, prepare, read_schema
from hardpoint.engine_core.structured.stepped import SteppedGrammar, clear_bits
from hardpoint.engine_core.structured.style import WHITESPACE, check_json_style
from hardpoint.engine_core.structured.styled import StyledBackend
from hardpoint.engine_core.structured.tags import legacy_tags
from hardpoint.extensions.refs import load_ref

_RULES = SchemaRules(
    keywords=frozenset({
        "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "properties", "patternProperties", "additionalProperties",
        "required", "minProperties", "maxProperties",
    }),
    formats=OTHER_FORMATS,
)  # fmt: skip
# More than this and a step could take too long.
_LIMITS = {"max_items_in_row": 2000, "step_lexer_fuel": 200_000, "step_max_items": 50_000, "verbose_errors": False}


# Why the library stops, where it says no more than the name of it.
_REASONS = {
    "NoExtension": "no text can satisfy it",
    "NoExtensionBias": "no text can satisfy it",
    "LexerTooComplex": "it is too complex",
    "ParserTooComplex": "it is too complex",
}


class GuidanceBackend(StyledBackend):
    """All kinds of constraint; refuses what it does not implement."""

    requires: ClassVar[str] = "llguidance"
    install: ClassVar[str] = "llguidance"

    @cached_property
    def _library(self) -> Any:
        return load_ref("llguidance:LLMatcher"), load_ref("llguidance:LLParserLimits")(**_LIMITS)

    @cached_property
    def _tokens(self) -> Any:
        wrapper = load_ref("llguidance:TokenizerWrapper")(_Vocabulary(self.tokenizer, self.vocab_size))
        return load_ref("llguidance:LLTokenizer")(wrapper, n_vocab=self.vocab_size)

    def prepare(self) -> None:
        """Import the library and give it the vocabulary."""
        _ = self._library, self._tokens

    def _compile(
        self, kind: StructuredOutputOptions, spec: str, stop_token_ids: list[int] | None, style: JsonStyle
    ) -> StructuredOutputGrammar:
        matcher_class, limits = self._library
        matcher = matcher_class(self._tokens, _source(matcher_class, kind, spec, style), log_level=0, limits=limits)
        if matcher.is_error():
            raise _complaint(matcher.get_error().strip(), kind)
        stops = stop_token_ids or [t for t in [self.tokenizer.eos_token_id] if t is not None]
        return GuidanceGrammar(matcher, stops, self._tokens.eos_token)


class GuidanceGrammar(SteppedGrammar):
    """The constraint of one request.

    end_token  what the library itself takes for the end of the text
    """

    def __init__(self, matcher: Any, stop_token_ids: Iterable[int], end_token: int) -> None:
        super().__init__(stop_token_ids)
        self._matcher = matcher
        self._end_token = end_token

    def _advance(self, token_id: int) -> bool:
        if token_id == self._end_token:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        if self._matcher.is_error():
            raise self._fault()
        return False

    def _take_back(self, num_tokens: int) -> None:
        if not self._matcher.rollback(num_tokens):
            raise self._fault()

    def _allow(self, row: np.ndarray) -> None:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise self._fault()
        clear_bits(row, [self._end_token])

    def _fault(self) -> GrammarError:
        text = self._matcher.get_error().replace("<non-verbose/>", "").strip()
        return GrammarError(_REASONS.get(text, text))

    def _is_complete(self) -> bool:
        return self._matcher.is_accepting()

    def _is_closed(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def _restart(self) -> None:
        self._matcher.reset()

    def fork(self) -> GuidanceGrammar:
        """An independent grammar at the start."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return GuidanceGrammar(matcher, self.stop_token_ids, self._end_token)


class _Vocabulary:
    """The shape in which the library takes a vocabulary."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special = [token for token in sorted(tokenizer.special_ids) if token < vocab_size]
        end = tokenizer.eos_token_id
        # The library wants an end token in any case; ours are other ones, see SteppedGrammar.
        self.eos_token_id = end if end is not None and end < vocab_size else (special or [vocab_size - 1])[0]
        self.special_token_ids = special
        for token in special:
            self.tokens[token] = b"<|special_%d|>" % token
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text. Where only one text is possible, the library allows only these, as a model expects."""
        return self._tokenizer.encode_bytes(text)


def _complaint(text: str, kind: StructuredOutputOptions) -> GrammarError:
    """The library's complaint; whether another backend could do better."""
    broken = kind is StructuredOutputOptions.REGEX and "regex parse error" in text and "not supported" not in text
    return MalformedConstraint(text) if broken else GrammarError(text)


def _source(matcher: Any, kind: StructuredOutputOptions, spec: str, style: JsonStyle) -> str:
    if kind is StructuredOutputOptions.JSON:
        return matcher.grammar_from_json_schema(_schema(spec, style), overrides=_json_options(style))
    if kind is StructuredOutputOptions.JSON_OBJECT:
        return matcher.grammar_from_json_schema('{"type":"object"}', overrides=_json_options(style))
    check_json_style(style, kind)
    if kind is StructuredOutputOptions.REGEX:
        return matcher.grammar_from_regex(spec)
    if kind is StructuredOutputOptions.CHOICE:
        alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec))
        # One lexeme: as alternatives of the parser, each choice would be an item of its own in every row.
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
    if kind is StructuredOutputOptions.GRAMMAR:
        try:
            return load_ref("llguidance:grammar_from")("grammar", spec)
        except (ValueError, RecursionError) as problem:
            raise GrammarError(str(problem)) from None
    return _tagged(matcher, spec)


def _schema(spec: str, style: JsonStyle) -> str:
    schema = prepare(read_schema(spec), _RULES, style.closed)
    # A schema may carry settings of the library; they are not the client's to choose.
    schema.pop("x-guidance", None)
    return json.dumps(schema)


def _json_options(style: JsonStyle) -> dict[str, Any]:
    if style.compact:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": style.whitespace_pattern or WHITESPACE}


def _tagged(matcher: Any, spec: str) -> str:
    tag = load_ref("llguidance:StructTag")
    tags = [
        tag(
            trigger=one.trigger,
            begin=one.begin,
            grammar=json.dumps(prepare(one.schema, _RULES)),
            end=one.end,
        )
        for one in legacy_tags(spec)
    ]
    # Triggers such as "<function=" are text, not tokens of their own.
    return matcher.grammar_from_lark(tag.to_grammar(tags, assume_special=False))
