"""Output that is bound only once the model has ended its reasoning."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.engine_core.request import Request
from hardpoint.engine_core.structured.start_marks import StartMarks
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.refs import load_ref

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

# The front end's: a reference, since roles do not import each other.
_GET_TOKENIZER = "hardpoint.front_end.tokenizers:get_tokenizer"


class Reasoners:
    """Tells, per request, whether the reasoning is over; always so without a reasoning parser.

    The constructor imports the parser's plugin and the parser: PluginError or ConfigError when that fails.

    token_of  the token of a piece of text; None when there is none
    """

    def __init__(self, vllm_config: VllmConfig, token_of: Callable[[bytes], int | None]) -> None:
        self._vllm_config = vllm_config
        self._token_of = token_of
        config = vllm_config.structured_outputs_config
        self._parser = choose_parser("reasoning_parsers", config.reasoning_parser, config.reasoning_parser_plugin)
        self._binds_all = self._parser is None or config.enable_in_reasoning

    @cached_property
    def _tokenizer(self) -> Any:
        return load_ref(_GET_TOKENIZER)(self._vllm_config.model_config)

    def is_over(self, request: Request) -> bool:
        """Whether the next token is no part of the reasoning."""
        if self._binds_all:
            return True
        state = request.structured_output_request
        if state.reasoning_ended is None:
            # A prompt may hold an empty reasoning, where the client has switched it off.
            prompt, reasoner = list(request.prompt_token_ids or ()), self._of(request)
            state.reasoning_ended = reasoner.is_reasoning_end(prompt)
            marks = None if state.reasoning_ended else reasoner.marks_of_start(prompt)
            if marks:
                state.start = StartMarks(marks, reasoner.vocab, self._token_of)
        return bool(state.reasoning_ended)

    def was_over(self, request: Request) -> bool:
        """Whether the reasoning was over before the newest output token; notes when it ends with it."""
        if self.is_over(request):
            return True
        state = request.structured_output_request
        newest = [request.all_token_ids[-1]]
        if self._of(request).is_reasoning_end_streaming(request.all_token_ids.copy(), newest):
            state.reasoning_ended = True
        return False

    def _of(self, request: Request) -> Any:
        state = request.structured_output_request
        if state.reasoner is None:
            assert self._parser is not None
            kwargs = {"model_config": self._vllm_config.model_config, **state.reasoning_parser_kwargs}
            state.reasoner = self._parser(self._tokenizer, **kwargs)
        return state.reasoner
