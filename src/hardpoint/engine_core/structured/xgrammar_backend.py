"""The backend `xgrammar`: a pushdown automaton, compiled whole with its token masks. Needs torch."""

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
from hardpoint.engine_core.structured.stepped import SteppedGrammar
from hardpoint.engine_core.structured.style import MOST_WHITESPACE, check_json_style
from hardpoint.engine_core.structured.styled import StyledBackend
from hardpoint.engine_core.structured.tags import is_legacy, legacy_tags, read_tag
from hardpoint.extensions.refs import load_ref

# What the library keeps to the letter; it leaves the rest out without an error.
_RULES = SchemaRules(
    keywords=frozenset({
        "type", "enum", "const", "anyOf", "$ref", "items", "prefixItems", "minItems",
        "maxItems", "properties", "additionalProperties", "required", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum",
    }),
    alone=frozenset({"enum", "const", "anyOf", "$ref"}),
    needs_type=True,
)  # fmt: skip
# Bounds of numbers are kept for whole ones only.
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class XgrammarBackend(StyledBackend):
    """All kinds of constraint; for JSON schemas the keywords that the library is known to keep."""

    requires: ClassVar[str] = "xgrammar"
    install: ClassVar[str] = "'hardpoint[structured-outputs]'"
    takes_whitespace_pattern = False

    @classmethod
    def why_unsupported(cls, request_type: StructuredOutputOptions, grammar_spec: str) -> str | None:
        """Why the library could not keep a constraint, told without it."""
        try:
            if request_type is StructuredOutputOptions.JSON:
                _prepared(grammar_spec)
            elif request_type is StructuredOutputOptions.REGEX:
                return why_irregular(grammar_spec)
            elif request_type is StructuredOutputOptions.STRUCTURAL_TAG:
                _check_tag(grammar_spec)
        except GrammarError as error:
            return str(error)
        return None

    @cached_property
    def _tokens(self) -> Any:
        pieces = [self.tokenizer.token_bytes(token) for token in range(self.vocab_size)]
        kinds, info = load_ref("xgrammar:VocabType"), load_ref("xgrammar:TokenizerInfo")
        return info(pieces, vocab_type=kinds.RAW, vocab_size=self.vocab_size, stop_token_ids=[self._end_token])

    @cached_property
    def _compiler(self) -> Any:
        return load_ref("xgrammar:GrammarCompiler")(self._tokens, max_threads=1, cache_enabled=False)

    def prepare(self) -> None:
        """Import the library, with torch, and give it the vocabulary."""
        _ = self._compiler, self._texts

    def _compile(
        self, kind: StructuredOutputOptions, spec: str, stop_token_ids: list[int] | None, style: JsonStyle
    ) -> StructuredOutputGrammar:
        check_json_style(style, kind)
        return self._grammar(self._compiled(kind, spec, style), stop_token_ids)

    def _grammar(self, compiled: Any, stop_token_ids: list[int] | None) -> XgrammarGrammar:
        return XgrammarGrammar(compiled, stop_token_ids or [self._end_token], self._texts)

    @cached_property
    def _texts(self) -> np.ndarray:
        """A row with the tokens that have a text; the library allows the others wherever any text may stand."""
        has_text = [bool(self.tokenizer.token_bytes(token)) for token in range(self.vocab_size)]
        has_text[self._end_token] = False
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[: self.vocab_size] = has_text
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _compiled(self, kind: StructuredOutputOptions, spec: str, style: JsonStyle) -> Any:
        options = StructuredOutputOptions
        if kind in (options.JSON, options.JSON_OBJECT):
            schema = _prepared(spec, style.closed) if kind is options.JSON else {"type": "object"}
            # Without strict_mode the library lets objects take any other property, as JSON Schema does.
            layout = (
                {"any_whitespace": False, "separators": (",", ":")}
                if style.compact
                else {"max_whitespace_cnt": MOST_WHITESPACE}
            )
            return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=kind is options.JSON, **layout)
        if kind is options.REGEX:
            return self._compiler.compile_regex(spec)
        if kind is options.CHOICE:
            return self._compiler.compile_regex(choice_regex(json.loads(spec)))
        if kind is options.GRAMMAR:
            return self._compiler.compile_grammar(spec)
        return self._compiler.compile_structural_tag(_tag(spec))

    def dump_grammar(self, grammar: StructuredOutputGrammar) -> bytes | None:
        """The library's own text of a compiled grammar."""
        assert isinstance(grammar, XgrammarGrammar)
        return grammar.compiled.serialize_json().encode()

    def load_grammar(self, dump: bytes, stop_token_ids: list[int] | None) -> StructuredOutputGrammar:
        """The grammar of such a text."""
        compiled = load_ref("xgrammar:CompiledGrammar").deserialize_json(dump.decode(), self._tokens)
        return self._grammar(compiled, stop_token_ids)


class XgrammarGrammar(SteppedGrammar):
    """The constraint of one request; `compiled` and `texts` are shared by all that have the same."""

    def __init__(self, compiled: Any, stop_token_ids: Iterable[int], texts: np.ndarray) -> None:
        super().__init__(stop_token_ids)
        self.compiled = compiled
        self._texts = texts
        self._matcher = load_ref("xgrammar:GrammarMatcher")(compiled)

    def _advance(self, token_id: int) -> bool:
        is_text = bool(self._texts[token_id // 32] >> (token_id % 32) & 1)
        return is_text and self._matcher.accept_token(token_id)

    def _take_back(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def _allow(self, row: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0)
        row &= self._texts

    def _is_complete(self) -> bool:
        return self._matcher.is_completed()

    def _is_closed(self) -> bool:
        return False

    def _restart(self) -> None:
        self._matcher.reset()

    def fork(self) -> XgrammarGrammar:
        """An independent grammar at the start."""
        return XgrammarGrammar(self.compiled, self.stop_token_ids, self._texts)


def _prepared(spec: str, closed: bool = False) -> Any:
    schema = prepare(read_schema(spec), _RULES, closed)
    _check_bounds(schema)
    return schema


def _check_bounds(node: Any) -> None:
    if isinstance(node, list):
        for child in node:
            _check_bounds(child)
    elif isinstance(node, dict):
        bound = next((word for word in _BOUNDS if isinstance(node.get(word), int | float)), None)
        if bound is not None and node.get("type") != "integer":
            raise GrammarError(f"the keyword {bound!r} cannot be kept beside a type other than integer")
        for child in node.values():
            _check_bounds(child)


def _check_tag(spec: str) -> None:
    tag = read_tag(spec)
    schemas = [one.schema for one in legacy_tags(spec)] if is_legacy(tag) else _schemas_in(tag)
    for schema in schemas:
        prepare(schema, _RULES)


def _schemas_in(node: Any) -> list[Any]:
    if isinstance(node, list):
        return [found for child in node for found in _schemas_in(child)]
    if not isinstance(node, dict):
        return []
    own = [node["json_schema"]] if "json_schema" in node else []
    return own + [found for word, child in node.items() if word != "json_schema" for found in _schemas_in(child)]


def _tag(spec: str) -> Any:
    tag = read_tag(spec)
    if not is_legacy(tag):
        return json.dumps({**tag, "type": "structural_tag"})
    stretches = [
        {"begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema}, "end": one.end}
        for one in legacy_tags(spec)
    ]
    form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": stretches}
    return json.dumps({"type": "structural_tag", "format": form})
