"""The backend `lm-format-enforcer`: parsers by character, walked along a tree of all tokens."""

from __future__ import annotations

import json
import re
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
from hardpoint.engine_core.structured.style import MOST_WHITESPACE, check_json_style
from hardpoint.engine_core.structured.styled import StyledBackend
from hardpoint.extensions.refs import load_ref

# What the library's parser keeps to the letter; it leaves the rest out without an error.
_RULES = SchemaRules(
    keywords=frozenset({
        "type", "enum", "const", "minLength", "maxLength", "items", "minItems", "maxItems", "properties",
        "additionalProperties", "required",
    }),
    alone=frozenset({"enum", "const"}),
    needs_type=True,
)  # fmt: skip
_OPTIONS = StructuredOutputOptions
_MOST_TAKEN_BACK = 256
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_ESCAPED = re.compile(r"[\"\\\x00-\x1f]")


class FormatEnforcerBackend(StyledBackend):
    """Regular expressions, choices and plain JSON schemas; slow, since it is written in Python."""

    requires: ClassVar[str] = "lmformatenforcer"
    install: ClassVar[str] = "'hardpoint[structured-outputs]'"
    takes_whitespace_pattern = False

    @classmethod
    def why_unsupported(cls, request_type: StructuredOutputOptions, grammar_spec: str) -> str | None:
        """Why the library could not keep a constraint, told without it."""
        if request_type in (_OPTIONS.GRAMMAR, _OPTIONS.STRUCTURAL_TAG):
            return f"a {request_type.name.lower().replace('_', ' ')} cannot be kept"
        if request_type is _OPTIONS.REGEX:
            return why_irregular(grammar_spec)
        if request_type is _OPTIONS.JSON:
            try:
                _prepared(grammar_spec)
            except GrammarError as error:
                return str(error)
        return None

    @cached_property
    def _texts(self) -> dict[int, str]:
        """Token -> text, for those that hold whole characters."""
        found = {}
        for token in range(self.vocab_size):
            try:
                text = self.tokenizer.token_bytes(token).decode()
            except UnicodeDecodeError:
                continue
            # It would let control characters into JSON's strings.
            if text and token != self._end_token and not _CONTROL.search(text):
                found[token] = text
        return found

    @cached_property
    def _tree(self) -> Any:
        texts = self._texts
        make = load_ref("lmformatenforcer:TokenEnforcerTokenizerData")
        return make(
            [(token, text, True) for token, text in texts.items()],
            lambda tokens: "".join(texts.get(token, "") for token in tokens),
            self._end_token,
            False,
            self.vocab_size,
        )

    def prepare(self) -> None:
        """Import the library and build its tree of tokens."""
        _ = self._tree

    def _compile(
        self, kind: StructuredOutputOptions, spec: str, stop_token_ids: list[int] | None, style: JsonStyle
    ) -> StructuredOutputGrammar:
        reason = self.why_unsupported(kind, spec)
        if reason is not None:
            raise GrammarError(reason)
        check_json_style(style, kind)
        make = _Source(kind, spec, style)
        return FormatEnforcerGrammar(make, self._tree, stop_token_ids or [self._end_token], self._end_token)


class _Source:
    """Makes the parser of a constraint; parsers change as they go, so each grammar has its own."""

    def __init__(self, kind: StructuredOutputOptions, spec: str, style: JsonStyle) -> None:
        self._kind, self._spec = kind, spec
        config = load_ref("lmformatenforcer:CharacterLevelParserConfig")
        self._config = config(
            max_consecutive_whitespaces=0 if style.compact else MOST_WHITESPACE,
            # Only where a schema does not say; the parser needs some bound.
            max_json_array_length=1 << 20,
        )

    def __call__(self) -> Any:
        if self._kind is _OPTIONS.REGEX:
            return load_ref("lmformatenforcer:RegexParser")(self._spec)
        if self._kind is _OPTIONS.CHOICE:
            return load_ref("lmformatenforcer:RegexParser")(choice_regex(json.loads(self._spec)))
        schema = _prepared(self._spec) if self._kind is _OPTIONS.JSON else {"type": "object"}
        return load_ref("lmformatenforcer:JsonSchemaParser")(schema, self._config)


class FormatEnforcerGrammar(SteppedGrammar):
    """The constraint of one request."""

    def __init__(self, make_parser: _Source, tree: Any, stop_token_ids: Iterable[int], end_token: int) -> None:
        super().__init__(stop_token_ids)
        self._make_parser = make_parser
        self._tree = tree
        self._end_token = end_token
        self._restart()

    def _restart(self) -> None:
        self._enforcer = load_ref("lmformatenforcer:TokenEnforcer")(self._tree, self._make_parser())
        self._tokens: list[int] = []
        self._allowed()

    def _allowed(self) -> list[int]:
        """The allowed tokens, the end token among them where the text is complete."""
        found = self._enforcer.get_allowed_tokens(self._tokens).allowed_tokens
        states = self._enforcer.prefix_states
        # Each state's key is the whole text before it: only those that may be needed again are kept.
        states.pop(tuple(self._tokens[: -_MOST_TAKEN_BACK - 1]) if len(self._tokens) > _MOST_TAKEN_BACK else None, None)
        return found

    def _advance(self, token_id: int) -> bool:
        if token_id == self._end_token or token_id not in self._allowed():
            return False
        self._tokens.append(token_id)
        self._allowed()
        return True

    def _take_back(self, num_tokens: int) -> None:
        del self._tokens[-num_tokens:]

    def _allow(self, row: np.ndarray) -> None:
        bits = np.zeros(row.size * 32, np.uint8)
        bits[self._allowed()] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        clear_bits(row, [self._end_token])

    def _is_complete(self) -> bool:
        return self._end_token in self._allowed()

    def _is_closed(self) -> bool:
        return self._allowed() == [self._end_token]

    def fork(self) -> FormatEnforcerGrammar:
        """An independent grammar at the start."""
        return FormatEnforcerGrammar(self._make_parser, self._tree, self.stop_token_ids, self._end_token)


def _prepared(spec: str) -> Any:
    schema = prepare(read_schema(spec), _RULES)
    _check_plain(schema)
    return schema


def _check_plain(node: Any) -> None:
    """Refuse what the parser would spell wrong: values other than texts, and texts with escapes."""
    if isinstance(node, list):
        for child in node:
            _check_plain(child)
    elif isinstance(node, dict):
        values = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
        if not all(isinstance(value, str) and value and not _ESCAPED.search(value) for value in values):
            raise GrammarError("values other than plain texts cannot be kept")
        if any(_ESCAPED.search(name) for name in node.get("properties", ())):
            raise GrammarError("names with quotes or backslashes cannot be kept")
        if node.get("maxItems") == 0:
            raise GrammarError("the keyword 'maxItems' cannot be kept for 0")
        for word, child in node.items():
            if word not in ("enum", "const"):
                _check_plain(list(child.values()) if word in ("properties", "$defs", "definitions") else child)
