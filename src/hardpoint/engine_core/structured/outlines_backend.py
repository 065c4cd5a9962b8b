"""The backend `outlines`: outlines-core, which turns a regular expression into an automaton over tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from hardpoint.contracts.structured_output import (
    GrammarError,
    JsonStyle,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.engine_core.structured.schema import SchemaRules, choice_regex, prepare, read_schema, why_irregular
from hardpoint.engine_core.structured.stepped import SteppedGrammar, clear_bits
from hardpoint.engine_core.structured.style import check_json_style
from hardpoint.engine_core.structured.styled import StyledBackend
from hardpoint.extensions.refs import load_ref

# What the library's expressions keep to the letter; it leaves the rest out without an error.
_RULES = SchemaRules(
    keywords=frozenset({
        "type", "enum", "const", "anyOf", "minLength", "maxLength", "items", "minItems", "maxItems", "properties",
        "additionalProperties", "required", "$ref",
    }),
    alone=frozenset({"enum", "const", "anyOf", "$ref"}),
    needs_type=True,
)  # fmt: skip
_OPTIONS = StructuredOutputOptions
_COMPACT = ""
# More would be taken back only if more tokens were drafted at a time.
_MOST_TAKEN_BACK = 256
# Masks that are remembered, for each automaton.
_MOST_ROWS = 1024


class OutlinesBackend(StyledBackend):
    """Regular expressions, choices, and JSON schemas without recursion."""

    requires: ClassVar[str] = "outlines_core"
    install: ClassVar[str] = "'hardpoint[structured-outputs]'"

    @classmethod
    def why_unsupported(cls, request_type: StructuredOutputOptions, grammar_spec: str) -> str | None:
        """Why the library could not keep a constraint, told without it."""
        if request_type in (_OPTIONS.GRAMMAR, _OPTIONS.STRUCTURAL_TAG, _OPTIONS.JSON_OBJECT):
            return f"a {request_type.name.lower().replace('_', ' ')} is no regular expression"
        if request_type is _OPTIONS.REGEX:
            return why_irregular(grammar_spec)
        if request_type is _OPTIONS.JSON:
            try:
                _prepared(grammar_spec)
            except GrammarError as error:
                return str(error)
        return None

    @cached_property
    def _vocabulary(self) -> Any:
        ids: dict[bytes, list[int]] = {}
        for token in range(self.vocab_size):
            piece = self.tokenizer.token_bytes(token)
            if piece and token != self._end_token:
                ids.setdefault(piece, []).append(token)
        return load_ref("outlines_core:Vocabulary")(self._end_token, ids)

    def prepare(self) -> None:
        """Import the library and give it the vocabulary."""
        _ = self._vocabulary

    def _compile(
        self, kind: StructuredOutputOptions, spec: str, stop_token_ids: list[int] | None, style: JsonStyle
    ) -> StructuredOutputGrammar:
        check_json_style(style, kind)
        reason = self.why_unsupported(kind, spec)
        if reason is not None:
            raise GrammarError(reason)
        expression = _expression(kind, spec, style)
        index = load_ref("outlines_core:Index")(expression, self._vocabulary)
        return self._grammar(index, stop_token_ids)

    def _grammar(self, index: Any, stop_token_ids: list[int] | None) -> OutlinesGrammar:
        return OutlinesGrammar(index, stop_token_ids or [self._end_token], self._end_token, {})

    def dump_grammar(self, grammar: StructuredOutputGrammar) -> bytes | None:
        """The library's own bytes of an automaton."""
        assert isinstance(grammar, OutlinesGrammar)
        return bytes(grammar.index.__reduce__()[1][0])

    def load_grammar(self, dump: bytes, stop_token_ids: list[int] | None) -> StructuredOutputGrammar:
        """The grammar of such bytes."""
        return self._grammar(load_ref("outlines_core:Index").from_binary(dump), stop_token_ids)


class OutlinesGrammar(SteppedGrammar):
    """The constraint of one request; `index` and `rows` (state -> mask) are shared by all that have the same."""

    def __init__(self, index: Any, stop_token_ids: Iterable[int], end_token: int, rows: dict[int, np.ndarray]) -> None:
        super().__init__(stop_token_ids)
        self.index = index
        self._rows = rows
        self._end_token = end_token
        # The states passed, the present one last.
        self._states = [index.get_initial_state()]

    def _advance(self, token_id: int) -> bool:
        following = None if token_id == self._end_token else self.index.get_next_state(self._states[-1], token_id)
        if following is None:
            return False
        self._states.append(following)
        del self._states[: -_MOST_TAKEN_BACK - 1]
        return True

    def _take_back(self, num_tokens: int) -> None:
        if num_tokens >= len(self._states):
            raise GrammarError(f"{num_tokens} tokens cannot be taken back")
        del self._states[-num_tokens:]

    def _allow(self, row: np.ndarray) -> None:
        state = self._states[-1]
        known = self._rows.get(state)
        if known is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            known = self._rows[state] = self._row(state, row.size)
        row[:] = known

    def _row(self, state: int, words: int) -> np.ndarray:
        bits = np.zeros(words * 32, np.uint8)
        bits[np.array(self.index.get_allowed_tokens(state) or [], np.int64)] = 1
        row = np.packbits(bits, bitorder="little").view(np.int32)
        clear_bits(row, [self._end_token])
        return row

    def _is_complete(self) -> bool:
        return self.index.is_final_state(self._states[-1])

    def _is_closed(self) -> bool:
        if not self._is_complete():
            return False
        allowed = self.index.get_allowed_tokens(self._states[-1]) or []
        return all(token == self._end_token for token in allowed[:2])

    def _restart(self) -> None:
        self._states = [self.index.get_initial_state()]

    def fork(self) -> OutlinesGrammar:
        """An independent grammar at the start."""
        return OutlinesGrammar(self.index, self.stop_token_ids, self._end_token, self._rows)


def _expression(kind: StructuredOutputOptions, spec: str, style: JsonStyle) -> str:
    if kind is _OPTIONS.REGEX:
        return spec
    if kind is _OPTIONS.CHOICE:
        return choice_regex(json.loads(spec))
    space = _COMPACT if style.compact else style.whitespace_pattern
    build = load_ref("outlines_core.json_schema:build_regex_from_schema")
    return build(json.dumps(_prepared(spec)), space)


def _prepared(spec: str) -> Any:
    # The expression for an object has the named properties only, which "closed" wishes anyway.
    schema = prepare(read_schema(spec), _RULES)
    _check_finite(schema, "#")
    return schema


def _check_finite(node: Any, path: str) -> None:
    """Refuse what an expression cannot describe: values of any kind, and schemas inside themselves."""
    if isinstance(node, list):
        for child in node:
            _check_finite(child, path)
    elif isinstance(node, dict):
        if node.get("type") == "object" and not node.get("properties"):
            raise GrammarError(f"an object without properties at {path} is no regular expression")
        if node.get("type") == "array" and not isinstance(node.get("items"), dict):
            raise GrammarError(f"an array without items at {path} is no regular expression")
        for word, child in node.items():
            _check_finite(child, f"{path}/{word}")
