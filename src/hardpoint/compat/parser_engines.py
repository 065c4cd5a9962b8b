"""vLLM's parser engines as plugins derive from them: one class per family, and an adapter that makes it a parser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.front_end.parsers.reasoning_formats import Qwen3ReasoningParser
from hardpoint.types.answers import DeltaMessage


class ParserEngine:
    """Keeps what a family's parsers are built with; `kwargs` has `chat_template_kwargs`."""

    reasoning_parser_cls: ClassVar[type[ReasoningParser]]

    def __init__(self, tokenizer: Any, tools: Any = None, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.kwargs = kwargs

    def reasoning_parser(self) -> ReasoningParser:
        """A reasoning parser of the family."""
        return self.reasoning_parser_cls(self.tokenizer, **self.kwargs)


class Qwen3Parser(ParserEngine):
    """Qwen 3."""

    reasoning_parser_cls = Qwen3ReasoningParser


class ParserEngineReasoningAdapter(ReasoningParser):
    """A reasoning parser that does as its engine's does."""

    _parser_engine_cls: ClassVar[type[ParserEngine]]

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._parser_engine = self._parser_engine_cls(tokenizer, None, **kwargs)
        self._reader = self._parser_engine.reasoning_parser()

    @property
    def reasoning_start_str(self) -> str | None:
        """What begins the reasoning."""
        return self._reader.reasoning_start_str

    @property
    def reasoning_end_str(self) -> str | None:
        """What ends the reasoning."""
        return self._reader.reasoning_end_str

    def adjust_request(self, request: Any) -> Any:
        """Change the request before it runs."""
        return self._reader.adjust_request(request)

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt as it was rendered."""
        self._reader.adjust_initial_state_from_prompt(prompt_token_ids)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether reasoning is over behind these ids."""
        return self._reader.is_reasoning_end(input_ids)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether reasoning is over with the new ids."""
        return self._reader.is_reasoning_end_streaming(input_ids, delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids behind the reasoning."""
        return self._reader.extract_content_ids(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many ids are reasoning."""
        return self._reader.count_reasoning_tokens(token_ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer."""
        return self._reader.extract_reasoning(model_output, request)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What the next piece of a stream adds."""
        return self._reader.extract_reasoning_streaming(
            previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
        )

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return self._reader.finish_streaming()
