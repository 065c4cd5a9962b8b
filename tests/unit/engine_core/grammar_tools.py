"""A small vocabulary, backends over it, and random walks along what a grammar allows."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np

from hardpoint.config.sections import StructuredOutputsConfig
from hardpoint.contracts.structured_output import GrammarError, StructuredOutputOptions
from hardpoint.engine_core.structured.backends import backend_class
from hardpoint.engine_core.structured.trial import compile_with
from hardpoint.engine_core.structured.vocabulary import GrammarTokenizer
from hardpoint.types.messages import TokenTable

WORDS = [
    b'{"', b'":', b'": ', b'", "', b'"}', b"[]", b"{}", b"true", b"false", b"null", b"abc", b"ab", b"  ", b"\n  ",
    b"10", b"-1", b"0.5", b"1e5", b'"a":', b'"b"', "ü".encode(), b"\\n", b"\\u00", b"name", b"\xc3", b"\xbc",
]  # fmt: skip
PIECES = [bytes([byte]) for byte in range(256)] + WORDS
# Two special tokens, the second of which ends a text; the model scores some more that nobody has.
SPECIAL = [len(PIECES), len(PIECES) + 1]
EOS = SPECIAL[1]
VOCAB_SIZE = len(PIECES) + 7
CLOSING = frozenset(token for token, piece in enumerate(PIECES) if piece and piece[0] in b'"}],')


def vocabulary() -> GrammarTokenizer:
    pieces = PIECES + [b""] * (VOCAB_SIZE - len(PIECES))
    return GrammarTokenizer(SimpleNamespace(), TokenTable(pieces, SPECIAL, EOS))


def make_backend(name: str, **settings):
    config = SimpleNamespace(structured_outputs_config=StructuredOutputsConfig(**settings))
    return backend_class(name)(config, vocabulary(), VOCAB_SIZE)


def compiled(backend, kind: StructuredOutputOptions, spec: str, stops=(EOS,), style=None):
    try:
        return compile_with(backend, kind, spec, list(stops), style)
    except GrammarError:
        raise
    except Exception as problem:  # as in a grammar compiler process, where a library may raise what it likes
        raise GrammarError(f"{type(problem).__name__}: {problem}") from None


def allowed(grammar) -> list[int]:
    """The tokens a grammar allows next; the row is dirty before, as it is in a running engine."""
    rows = np.full((2, -(-VOCAB_SIZE // 32)), -1, np.int32)
    grammar.fill_bitmask(rows, 1)
    return np.flatnonzero(np.unpackbits(rows[1].view(np.uint8), bitorder="little")).tolist()


def tokens_of(text: str | bytes) -> list[int]:
    return list(text.encode() if isinstance(text, str) else text)


def accepts(grammar, text: str | bytes) -> bool:
    """Whether the whole text is one that the grammar takes."""
    grammar = grammar.fork()
    ids = tokens_of(text)
    return grammar.validate_tokens(ids) == ids and (grammar.accept_tokens("r", ids), EOS in allowed(grammar))[1]


def random_text(grammar, rng: random.Random, most: int = 120) -> str | None:
    """A text along random allowed tokens, leaning towards its end; None when it did not end in `most` tokens."""
    out: list[int] = []
    for _ in range(most):
        if grammar.is_terminated():
            break
        choices = allowed(grammar)
        assert choices, f"a dead end after {b''.join(PIECES[t] for t in out)!r}"
        texts = [token for token in choices if token != EOS]
        if EOS in choices and (not texts or rng.random() < 0.7):
            assert grammar.accept_tokens("r", [EOS])
            assert grammar.is_terminated()
            break
        assert all(token < len(PIECES) for token in texts), "a token without text is allowed"
        closing = [token for token in texts if token in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.5 else texts)
        assert grammar.accept_tokens("r", [token]), f"{PIECES[token]!r} is allowed and not accepted"
        out.append(token)
    else:
        return None
    return b"".join(PIECES[token] for token in out).decode(errors="replace")
