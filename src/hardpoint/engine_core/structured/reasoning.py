"""Output that is bound only once the model has ended its reasoning."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.engine_core.request import Request
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.refs import load_ref

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

# The front end's: a reference, since roles do not import each other.
_GET_TOKENIZER = "hardpoint.front_end.tokenizers:get_tokenizer"


class Reasoners:
    """Tells, per request, whether the reasoning is over; always so without a reasoning parser.

    The constructor imports the parser's plugin and the parser: PluginError or ConfigError when that fails.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
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
            state.reasoning_ended = self._of(request).is_reasoning_end(list(request.prompt_token_ids or ()))
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
