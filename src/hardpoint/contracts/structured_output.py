"""What a structured-output backend implements: it turns a constraint into masks over the vocabulary.

A constraint is compiled off the step path: first on trial in a process of its own, under limits on
time and memory, then, once that went well, in the engine core.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


class StructuredOutputOptions(enum.Enum):
    """The kinds of constraint."""

    JSON = enum.auto()  # the text of a JSON schema
    JSON_OBJECT = enum.auto()  # any JSON object; the specification is empty
    REGEX = enum.auto()  # a regular expression that the whole output matches
    GRAMMAR = enum.auto()  # the text of a Lark or GBNF grammar
    CHOICE = enum.auto()  # the JSON text of a list of texts
    STRUCTURAL_TAG = enum.auto()  # the JSON text of a structural tag


class GrammarError(ValueError):
    """A constraint that this backend cannot keep; the text is for the client."""


class MalformedConstraint(GrammarError):
    """A constraint that is wrong for every backend, such as a regex with an open bracket: no other one is asked."""


@dataclass(frozen=True)
class JsonStyle:
    """What a request says of its JSON beside the schema.

    compact             no white space between JSON's tokens
    closed              objects take no properties but those the schema names
    whitespace_pattern  regular expression of the white space between JSON's tokens
    """

    compact: bool = False
    closed: bool = False
    whitespace_pattern: str | None = None


class StructuredOutputGrammar(ABC):
    """The constraint of one request, and how far its output has got.

    Built   by its backend's `compile_grammar`, once per request, or as the `fork` of one that was.
    Called  in the engine core between two steps, by one thread.
    Fault   what it raises ends its request with that error; the others go on.
    """

    @abstractmethod
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Take in the output's next tokens; False when one of them is not allowed."""

    @abstractmethod
    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The leading part of `tokens` that would be accepted; the state stays as it is."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    @abstractmethod
    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Write the allowed next tokens into row `batch_index` of what `allocate_token_bitmask` made.

        Bit j % 32 of word j // 32 set: token j is allowed. Where the output may end, the stop tokens are.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the output is complete and nothing can follow; its request then ends."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the start."""

    def fork(self) -> StructuredOutputGrammar | None:
        """An independent grammar at the start, so that another request need not compile; None: it must."""
        return None


@dataclass
class StructuredOutputBackend(ABC):
    """A library that compiles constraints; `structured_outputs_config.backend` names one.

    Built   once in the engine core and once in each trial process, by the first request that needs it.
    Called  `compile_grammar` on a thread that no step waits for; the trial process is ended past the limits.
    Fault   raise GrammarError, saying why: the request is answered with status 400, or `auto` asks the next
            backend. A keyword that cannot be kept must be refused, never left out.

    tokenizer   has vLLM's method names, and `token_bytes(id)`
    vocab_size  tokens the model scores, which may be more than the tokenizer has
    """

    # The package that must be installed, and what installs it.
    requires: ClassVar[str] = ""
    install: ClassVar[str] = ""

    vllm_config: VllmConfig
    tokenizer: Any
    vocab_size: int

    @classmethod
    def why_unsupported(cls, request_type: StructuredOutputOptions, grammar_spec: str) -> str | None:
        """Why this backend cannot keep a constraint, told without importing its library; None when it may."""
        return None

    def prepare(self) -> None:  # noqa: B027 - optional
        """Import the library and build what all constraints share; its time counts against none of them."""

    @abstractmethod
    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: list[int] | None = None
    ) -> StructuredOutputGrammar:
        """Compile a constraint; `stop_token_ids` end the output where it is complete."""

    def compile_styled(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: list[int] | None,
        style: JsonStyle,
    ) -> StructuredOutputGrammar:
        """The same under a request's wishes for its JSON; refused unless overridden."""
        raise GrammarError("this backend has no options for white space and additional properties")

    def dump_grammar(self, grammar: StructuredOutputGrammar) -> bytes | None:
        """What the trial process sends of a compiled grammar; None: the engine core compiles it again."""
        return None

    def load_grammar(self, dump: bytes, stop_token_ids: list[int] | None) -> StructuredOutputGrammar:
        """The grammar of a dump."""
        raise NotImplementedError

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        """[max_num_seqs, ceil(vocab_size / 32)] int32 in host memory: an array or a tensor."""
        return np.zeros((max_num_seqs, -(-self.vocab_size // 32)), np.int32)

    def destroy(self) -> None:  # noqa: B027 - optional
        """Release what is held; the process ends."""
