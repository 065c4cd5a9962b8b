"""A reasoning parser for a mark of our own, registered under a name by a general plugin."""

from collections.abc import Sequence
from typing import Any

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.extensions.parser_managers import ReasoningParserManager
from hardpoint.types.answers import DeltaMessage

END = "\n=> "


class AcmeReasoningParser(ReasoningParser):
    """What stands in front of a line that begins with `=> ` is reasoning; without such a line nothing is content."""

    reasoning_end_str = END

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._kept = ""
        self._in_content = False

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether these ids hold the end mark."""
        return END in self.model_tokenizer.decode(list(input_ids))

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids behind the end mark."""
        places = (i for i in range(len(input_ids) + 1) if self.is_reasoning_end(input_ids[:i]))
        return list(input_ids[next(places, len(input_ids)) :])

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer."""
        reasoning, _, content = model_output.partition(END)
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What is certain by now; what may be the beginning of the end mark is kept."""
        if self._in_content:
            return DeltaMessage(content=delta_text)
        reasoning, mark, content = (self._kept + delta_text).partition(END)
        self._in_content, self._kept = bool(mark), ""
        if not mark:
            keep = next((n for n in range(len(END) - 1, 0, -1) if reasoning.endswith(END[:n])), 0)
            cut = len(reasoning) - keep
            reasoning, self._kept = reasoning[:cut], reasoning[cut:]
        return DeltaMessage(reasoning=reasoning or None, content=content or None)

    def finish_streaming(self) -> DeltaMessage | None:
        """What was kept was reasoning."""
        return DeltaMessage(reasoning=self._kept) if self._kept else None


def register() -> None:
    """The general plugin: it runs in every process, and imports nothing heavy."""
    ReasoningParserManager.register_module("acme", module=AcmeReasoningParser)
