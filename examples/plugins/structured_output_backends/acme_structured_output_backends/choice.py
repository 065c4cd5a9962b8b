"""The backend: the output is one of the given texts, kept by comparing beginnings."""

import json

import numpy as np

from hardpoint.contracts.structured_output import (
    GrammarError,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)


class AcmeChoiceBackend(StructuredOutputBackend):
    """Choices only; every other kind is refused, so that nothing is left unbound."""

    @classmethod
    def why_unsupported(cls, request_type: StructuredOutputOptions, grammar_spec: str) -> str | None:
        """Say early what this backend cannot do."""
        return None if request_type is StructuredOutputOptions.CHOICE else "acme_choice keeps choices only"

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: list[int] | None = None
    ) -> "AcmeChoiceGrammar":
        """Every token with its text once, then a list of whole texts."""
        reason = self.why_unsupported(request_type, grammar_spec)
        if reason:
            raise GrammarError(reason)
        pieces = {token: self.tokenizer.token_bytes(token) for token in range(self.vocab_size)}
        texts = [text.encode() for text in json.loads(grammar_spec)]
        stops = stop_token_ids or [self.tokenizer.eos_token_id]
        return AcmeChoiceGrammar({token: piece for token, piece in pieces.items() if piece}, texts, stops)


class AcmeChoiceGrammar(StructuredOutputGrammar):
    """What was written so far, as the list of its beginnings; a stop token ends it."""

    def __init__(self, pieces: dict[int, bytes], texts: list[bytes], stops: list[int]) -> None:
        self._pieces, self._texts, self._stops = pieces, texts, stops
        self._written = [b""]
        self._stopped = False

    def _follow(self, token: int) -> bytes | None:
        longer = self._written[-1] + self._pieces.get(token, b"\0")
        return longer if any(text.startswith(longer) for text in self._texts) else None

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token in self._stops and self._written[-1] in self._texts:
                self._stopped = True
                continue
            longer = None if self._stopped else self._follow(token)
            if longer is None:
                return False
            self._written.append(longer)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        count = 0
        while count < len(tokens) and self.accept_tokens("", [tokens[count]]):
            count += 1
        self.rollback(count)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._stopped:
            self._stopped, num_tokens = False, num_tokens - 1
        if num_tokens:
            del self._written[-num_tokens:]

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        row = bitmask[batch_index]
        row[:] = 0
        allowed = [] if self._stopped else [token for token in self._pieces if self._follow(token) is not None]
        if self._stopped or self._written[-1] in self._texts:
            allowed += self._stops
        for token in allowed:
            row[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    def is_terminated(self) -> bool:
        written = self._written[-1]
        return self._stopped or (
            written in self._texts and not any(t.startswith(written) and t != written for t in self._texts)
        )

    def reset(self) -> None:
        self._written, self._stopped = [b""], False

    def fork(self) -> "AcmeChoiceGrammar":
        return AcmeChoiceGrammar(self._pieces, self._texts, self._stops)
