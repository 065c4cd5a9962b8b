"""What the engine core keeps of a request that has a constraint."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hardpoint.contracts.structured_output import GrammarError, StructuredOutputGrammar
from hardpoint.engine_core.structured.compiler import Compiled
from hardpoint.engine_core.structured.constraint import Constraint
from hardpoint.engine_core.structured.start_marks import StartMarks


@dataclass
class StructuredOutputRequest:
    """A request's constraint, its grammar once that is compiled, and how far its reasoning has got.

    reasoning_ended  None: not looked at yet; without a reasoning parser the constraint begins at once
    start            while the answer may begin with reasoning or with what is bound
    start_only       what is written so far can only become a start mark
    fault            why the grammar cannot go on
    is_clients_fault  whether it is the constraint's doing, such as one that became too complex
    """

    constraint: Constraint
    pending: Future[Compiled] | None = None
    compiled: Compiled | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoner: Any = None
    start: StartMarks | None = None
    start_only: bool = False
    fault: str | None = None
    is_clients_fault: bool = False

    def note_fault(self, error: Exception) -> None:
        """Note that the grammar failed."""
        self.is_clients_fault = isinstance(error, GrammarError)
        self.fault = f"the grammar failed: {' '.join(str(error).split())}"

    @property
    def grammar(self) -> StructuredOutputGrammar:
        """The grammar; only once it is compiled."""
        assert self.compiled is not None
        return self.compiled.grammar

    @property
    def is_grammar_ready(self) -> bool:
        """Whether the request can run."""
        return self.compiled is not None
