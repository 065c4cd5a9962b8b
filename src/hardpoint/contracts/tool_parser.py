"""Finding tool calls in what a model writes: what a tool parser implements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.contracts.parser_vocabulary import vocabulary_of
from hardpoint.extensions.refs import load_ref

if TYPE_CHECKING:
    from hardpoint.types.answers import DeltaMessage, ExtractedToolCallInformation

# A tool of a request: an object with `function.name` and `function.parameters`, or flat.
Tool = Any
_CONSTRAIN = "hardpoint.front_end.parsers.tool_choice:constrain"


class ToolParser:
    """Reads the tool calls of one answer.

    Built   in the front end with the server's tokenizer and the request's tools: once per answer, and once per
            request for `adjust_request`.
    Called  adjust_request: before admission, when the request has tools and may call them. Then for a whole answer
            extract_tool_calls once; for a stream extract_tool_calls_streaming for every piece in order, and
            finish_streaming behind the last. Reasoning is taken out before.
    Blocks  must not: it runs on the event loop of all requests.
    Fault   what a method raises ends this request with an error that names the parser; others go on.

    supports_required_and_named  `tool_choice` required and named constrain the answer to JSON, which is read without
                                 this parser; False: they come to this parser, unconstrained
    engine_based_streaming       the stream is complete by itself: nothing is added from `prev_tool_call_arr`
    """

    supports_required_and_named: ClassVar[bool] = True
    structural_tag_model: ClassVar[str | None] = None
    default_tool_strict_level: ClassVar[str | None] = None
    engine_based_streaming: ClassVar[bool] = False

    def __init__(self, tokenizer: Any, tools: list[Tool] | None = None) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        # What has been parsed and what has been sent of it, per call: {"name", "arguments"}, and JSON text.
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.streamed_args_for_tool: list[str] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token -> id."""
        return vocabulary_of(self.model_tokenizer)

    def adjust_request(self, request: Any) -> Any:
        """Change the request before it runs; the default constrains required and named choices to JSON."""
        return load_ref(_CONSTRAIN)(request) if self.supports_required_and_named else request

    def get_structural_tag(self, request: Any, *, reasoning: bool = False, strict_level: Any = None) -> Any:
        """A structural tag, as JSON text or an object, that holds the calls of strict tools to their schemas.

        Asked where a tool is strict and the model may choose whether to call it; None = that cannot be kept, and the
        request is refused.
        """
        return None

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls and the content of a whole answer."""
        raise NotImplementedError(f"{type(self).__name__} does not read whole answers")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """What the next piece of a stream adds; None while that is not known."""
        raise NotImplementedError(f"{type(self).__name__} does not read streams")

    def finish_streaming(self) -> DeltaMessage | None:
        """The stream is over: what was held back."""
        return None

    def get_remaining_unstreamed_args(self) -> str:
        """What the last call's parsed arguments have beyond those that were streamed."""
        if self.engine_based_streaming or not self.prev_tool_call_arr:
            return ""
        last = len(self.prev_tool_call_arr) - 1
        arguments = self.prev_tool_call_arr[last].get("arguments")
        if arguments is None or last >= len(self.streamed_args_for_tool):
            return ""
        whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        sent = self.streamed_args_for_tool[last]
        return whole[len(sent) :] if whole.startswith(sent) else ""
