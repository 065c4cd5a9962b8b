"""The suite for structured-output backends."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from hardpoint.config.sections import StructuredOutputsConfig
from hardpoint.contracts.structured_output import (
    GrammarError,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.testing.failures import explained, require, require_call, require_class, require_sync

Constraints = Mapping[StructuredOutputOptions, tuple[str, str, str]]

_CHOICE = {StructuredOutputOptions.CHOICE: ('["yes", "no"]', "yes", "maybe")}
# One token for each byte, one that ends a text, and ids that no token has.
_EOS, _VOCAB_SIZE = 256, 300


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    eos_token_id = _EOS
    special_ids = frozenset({_EOS})

    def token_bytes(self, token_id: int) -> bytes:
        """The byte of a token; nothing for the others."""
        return bytes([token_id]) if token_id < _EOS else b""

    def encode_bytes(self, text: bytes) -> list[int]:
        """A token for each byte."""
        return list(text)

    def __len__(self) -> int:
        return _VOCAB_SIZE


def check_structured_output_backend(cls: Any, constraints: Constraints = _CHOICE, **settings: Any) -> None:
    """Have a backend compile constraints and walk along a text of each.

    constraints  kind -> (constraint, a text it allows, a text it does not)
    settings     fields of `structured_outputs_config`
    """
    subject = require_class(cls, StructuredOutputBackend)
    require_sync(cls, subject, "compile_grammar", "why_unsupported", "destroy")
    require_call(
        cls.compile_grammar, subject, "compile_grammar(self, request_type, grammar_spec, stop_token_ids=None)",
        None, StructuredOutputOptions.CHOICE, "[]", [_EOS],
    )  # fmt: skip
    config = SimpleNamespace(structured_outputs_config=StructuredOutputsConfig(**settings))
    with explained(subject, "the constructor", "it is called with vllm_config, tokenizer and vocab_size"):
        backend = cls(config, ByteTokenizer(), _VOCAB_SIZE)
    for kind in StructuredOutputOptions:
        if kind in constraints:
            _Walk(backend, subject, kind, *constraints[kind]).check()
        else:
            _check_refusal(backend, subject, kind)
    with explained(subject, "destroy", "it is called once, when the engine core ends"):
        backend.destroy()


def _check_refusal(backend: Any, subject: str, kind: StructuredOutputOptions) -> None:
    """A kind that is not tried must compile or be refused with a reason; anything else is a fault."""
    spec = {"JSON": '{"type": "boolean"}', "REGEX": "a|b", "CHOICE": '["a"]', "GRAMMAR": 'root ::= "a"'}.get(
        kind.name, ""
    )
    reason = backend.why_unsupported(kind, spec)
    require(reason is None or bool(reason), subject, "why_unsupported gives an empty reason", "say why in words")
    if reason is None and spec:
        try:
            backend.compile_grammar(kind, spec, [_EOS])
        except GrammarError as error:
            require(bool(str(error)), subject, f"{kind.name} is refused without a reason", "say why in words")
        except Exception as error:
            fix = "raise GrammarError for a constraint that cannot be kept"
            require(False, subject, f"compile_grammar({kind.name}) raised {type(error).__name__}: {error}", fix)


class _Walk:
    """One constraint, and a text along which its grammar is led."""

    def __init__(
        self, backend: Any, subject: str, kind: StructuredOutputOptions, spec: str, text: str, wrong: str
    ) -> None:
        self._backend, self._subject, self._kind, self._spec = backend, subject, kind, spec
        self._text, self._wrong = list(text.encode()), list(wrong.encode())

    def check(self) -> None:
        reason = self._backend.why_unsupported(self._kind, self._spec)
        self._require(reason is None, f"why_unsupported refuses it: {reason}", "keep what the backend is for")
        with explained(self._subject, f"compile_grammar({self._kind.name})", "return a StructuredOutputGrammar"):
            grammar = self._backend.compile_grammar(self._kind, self._spec, [_EOS])
        self._require(
            isinstance(grammar, StructuredOutputGrammar), "compile_grammar returns no grammar", "return a grammar"
        )
        self._walk(grammar)
        self._check_state(grammar)

    def _require(self, holds: bool, what: str, fix: str) -> None:
        require(holds, self._subject, f"{self._kind.name}: {what}", fix)

    def _allowed(self, grammar: Any) -> set[int]:
        buffer = self._backend.allocate_token_bitmask(2)
        rows = np.asarray(buffer)
        words = -(-_VOCAB_SIZE // 32)
        shape = f"allocate_token_bitmask gives {rows.dtype} {rows.shape}"
        self._require(rows.shape == (2, words) and rows.dtype == np.int32, shape, f"give int32 [rows, {words}]")
        rows[:] = -1
        grammar.fill_bitmask(buffer, 1)
        self._require(bool((rows[0] == -1).all()), "fill_bitmask writes another row", "write row batch_index only")
        return set(np.flatnonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little")).tolist())

    def _walk(self, grammar: Any) -> None:
        for place, token in enumerate(self._text):
            allowed = self._allowed(grammar)
            at = f"after {bytes(self._text[:place])!r}"
            self._require(token in allowed, f"{at} the mask lacks {chr(token)!r}", "allow every text that satisfies it")
            known = all(one <= _EOS for one in allowed)
            self._require(known, f"{at} the mask has ids without a token", "leave tokens without a text out")
            self._require(not grammar.is_terminated(), f"{at} it is terminated", "only a complete text is")
            taken = grammar.accept_tokens("r", [token])
            self._require(bool(taken), f"{at} accept_tokens refuses {chr(token)!r}", "accept what the mask allows")
        ends = grammar.is_terminated() or _EOS in self._allowed(grammar)
        self._require(ends, "a complete text cannot end", "allow the stop tokens there, or be terminated")

    def _check_state(self, grammar: Any) -> None:
        grammar.reset()
        first = self._allowed(grammar)
        valid = grammar.validate_tokens(self._text)
        self._require(list(valid) == self._text, f"validate_tokens gives {valid}", "return the accepted part")
        right = grammar.validate_tokens(self._wrong)
        self._require(list(right) != self._wrong, "a wrong text is accepted", "refuse what does not satisfy it")
        self._require(self._allowed(grammar) == first, "validate_tokens changes the state", "leave it as it was")
        grammar.accept_tokens("r", self._text)
        grammar.rollback(len(self._text))
        self._require(self._allowed(grammar) == first, "rollback does not undo accept_tokens", "take back each token")
        other = grammar.fork()
        if other is not None:
            other.accept_tokens("r", self._text[:1])
            self._require(self._allowed(grammar) == first, "a fork shares its state", "copy what changes")
