"""Telling a model's reasoning from its answer: what a reasoning parser implements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.parser_vocabulary import vocabulary_of

if TYPE_CHECKING:
    from hardpoint.types.answers import DeltaMessage


class ReasoningParser:
    """Splits one answer into reasoning and content.

    Built   with the tokenizer and the keywords `chat_template_kwargs` and `model_config`: in the front end once per
            answer; in the engine core once per request with structured output.
    Called  in the front end adjust_request and adjust_initial_state_from_prompt: before the request runs. Then for a
            whole answer extract_reasoning once; for a stream extract_reasoning_streaming for every piece in order,
            and finish_streaming behind the last. Where is_reasoning_end says of the prompt that reasoning is over,
            a stream goes to the content without this parser.
            In the engine core is_reasoning_end and marks_of_start for the prompt, then is_reasoning_end_streaming
            after every step until it says yes: from the next token on the structured output's grammar holds.
    Blocks  must not.
    Fault   what a method raises ends this request with an error that names the parser; others go on.
    """

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer
        self.model_config = kwargs.get("model_config")

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return vocabulary_of(self.model_tokenizer)

    @property
    def reasoning_start_str(self) -> str | None:
        """What begins the reasoning; None when that is not known."""
        return None

    @property
    def reasoning_end_str(self) -> str | None:
        """What ends the reasoning; None when that is not known."""
        return None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether reasoning is over behind these ids, the prompt included."""
        raise NotImplementedError(f"{type(self).__name__} does not say where reasoning ends")

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether reasoning is over behind `input_ids`, of which `delta_ids` are new."""
        return self.is_reasoning_end(input_ids)

    def marks_of_start(self, prompt_token_ids: Sequence[int]) -> Sequence[str] | None:
        """The texts of which one begins an answer that has reasoning; an answer without them is bound from the start.

        None where an answer may begin with reasoning that nothing marks, or the prompt has begun it.
        """
        return None

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids behind the reasoning; none while it goes on."""
        raise NotImplementedError(f"{type(self).__name__} does not say which ids are content")

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer."""
        raise NotImplementedError(f"{type(self).__name__} does not read whole answers")

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What the next piece of a stream adds; None while that is not known."""
        raise NotImplementedError(f"{type(self).__name__} does not read streams")

    def finish_streaming(self) -> DeltaMessage | None:
        """The stream is over: what was held back."""
        return None

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of an answer's ids are reasoning."""
        return 0

    def adjust_request(self, request: Any) -> Any:
        """Change the request before it runs."""
        return request

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt as it was rendered: a template may have begun or ended the reasoning already."""

    def prepare_structured_tag(self, original_tag: str | None, tool_server: Any = None) -> str | None:
        """The structural tag of a request, with what the reasoning needs."""
        return original_tag

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the parser itself has seen the end of the reasoning."""
        return False
