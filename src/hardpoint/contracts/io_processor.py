"""Turning a request's own data into prompts and a pooling model's outputs into an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hardpoint.types.outputs import PoolingRequestOutput
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

IOProcessorInput = TypeVar("IOProcessorInput")
IOProcessorOutput = TypeVar("IOProcessorOutput")


class IOProcessor(ABC, Generic[IOProcessorInput, IOProcessorOutput]):
    """Wraps a pooling model in a format of its own.

    Built   in the front end, once, with (vllm_config, renderer), if the user or the model names it.
    Called  for each request: parse_data, pre_process, merge_pooling_params, then post_process.
    Blocks  the four may compute; they run off the event loop.
    Fault   what they raise ends that request: ValueError as HTTP 400, anything else as 500.
    """

    def __init__(self, vllm_config: VllmConfig, renderer: Any = None) -> None:
        self.vllm_config = vllm_config

    def parse_data(self, data: object) -> IOProcessorInput:
        """Check and convert the `data` of a request; ValueError for what is not acceptable."""
        raise NotImplementedError(f"{type(self).__name__} does not implement parse_data")

    @abstractmethod
    def pre_process(self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any) -> Any:
        """The prompt, or sequence of prompts, to run."""

    @abstractmethod
    def post_process(
        self,
        model_output: Sequence[PoolingRequestOutput[Any]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> IOProcessorOutput:
        """The answer, from the outputs of all prompts in their order."""

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """The parameters to run with; those of the request if it has any."""
        return params or PoolingParams(task="plugin")

    def merge_sampling_params(self, params: SamplingParams | None = None) -> SamplingParams:
        """The same for a generating model."""
        return params or SamplingParams()

    async def pre_process_async(self, prompt: IOProcessorInput, request_id: str | None = None, **kwargs: Any) -> Any:
        """`pre_process` for processors that wait for something."""
        return self.pre_process(prompt, request_id, **kwargs)

    async def post_process_async(
        self,
        model_output: AsyncGenerator[tuple[int, PoolingRequestOutput[Any]], None],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> IOProcessorOutput:
        """`post_process` on (index, output) pairs as they come."""
        pairs = sorted([pair async for pair in model_output], key=lambda pair: pair[0])
        return self.post_process([output for _, output in pairs], request_id, **kwargs)
