"""What our backends share: the style that a constraint is compiled under, and the token that ends a text."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from hardpoint.contracts.structured_output import (
    GrammarError,
    JsonStyle,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from hardpoint.engine_core.structured.style import style_of_config, united


class StyledBackend(StructuredOutputBackend):
    """Unites a request's wishes for its JSON with those of the configuration."""

    takes_whitespace_pattern: ClassVar[bool] = True

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: list[int] | None = None
    ) -> StructuredOutputGrammar:
        """Compile a constraint."""
        return self.compile_styled(request_type, grammar_spec, stop_token_ids, JsonStyle())

    def compile_styled(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: list[int] | None,
        style: JsonStyle,
    ) -> StructuredOutputGrammar:
        """Compile a constraint under wishes for its JSON."""
        style = united(style, style_of_config(self.vllm_config))
        if style.whitespace_pattern is not None and not self.takes_whitespace_pattern:
            raise GrammarError("whitespace_pattern cannot be kept")
        return self._compile(request_type, grammar_spec, stop_token_ids, style)

    @abstractmethod
    def _compile(
        self, kind: StructuredOutputOptions, spec: str, stop_token_ids: list[int] | None, style: JsonStyle
    ) -> StructuredOutputGrammar:
        """Compile a constraint under these wishes; raises GrammarError, saying what cannot be kept."""

    @property
    def _end_token(self) -> int:
        end = self.tokenizer.eos_token_id
        return end if end is not None and end < self.vocab_size else self.vocab_size - 1
