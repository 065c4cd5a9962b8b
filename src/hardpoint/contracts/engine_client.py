"""Talking to an engine: what the HTTP server, endpoint plugins and scripts hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hardpoint.config.sections import ModelConfig, VllmConfig


class EngineClient(ABC):
    """A running engine, seen from the front end.

    Built   by the front end; others are given one.
    Called  from the event loop it was built on.
    Blocks  nothing does; a wait is a coroutine.
    Fault   a request that is not acceptable raises VLLMValidationError (a ValueError); a request that fails
            inside the engine raises EngineGenerateError; once the engine has ended, everything raises
            EngineDeadError. What an engine cannot do raises NotImplementedError naming the method.
    """

    vllm_config: VllmConfig
    model_config: ModelConfig
    renderer: Any
    input_processor: Any

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """Whether outputs are being read."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether reading outputs has ended."""

    @property
    @abstractmethod
    def errored(self) -> bool:
        """Whether the engine has ended with an error."""

    @property
    @abstractmethod
    def dead_error(self) -> BaseException:
        """That error."""

    @abstractmethod
    def generate(
        self,
        prompt: EngineCoreRequest | Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request and yield its outputs; the last one has `finished` set.

        Closing the generator, or cancelling the task that reads it, aborts the request.
        """

    @abstractmethod
    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Run one pooling request and yield its output."""

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop one request or several; unknown ids are ignored."""

    @abstractmethod
    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has ended."""

    @abstractmethod
    async def do_log_stats(self) -> None:
        """Let the stat loggers write now."""

    @abstractmethod
    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can do, such as `generate`."""

    @abstractmethod
    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False if running requests kept some."""

    @abstractmethod
    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of every worker; a list with one result per worker.

        timeout  seconds until TimeoutError; None waits without end
        """

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine; requests get `timeout` seconds to finish."""

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:  # noqa: B027 - optional
        """Raise AdmissionError when a queue limit does not allow `n` more sequences."""

    def get_kv_event_sources(self) -> dict[int, Any]:
        """Where cache events are published, by data-parallel rank."""
        return {}

    async def is_tracing_enabled(self) -> bool:
        """Whether spans are exported."""
        return False

    async def is_sleeping(self) -> bool:
        """Whether the engine has given its memory back for a while."""
        return False

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return False

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Tell the connector that a request never ran."""
        self._cannot("notify_kv_transfer_request_rejected")

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin profiling on every worker."""
        self._cannot("start_profile")

    async def stop_profile(self) -> None:
        """End profiling."""
        self._cannot("stop_profile")

    async def reset_mm_cache(self) -> None:
        """Drop cached media."""
        self._cannot("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Drop cached encoder outputs."""
        self._cannot("reset_encoder_cache")

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 0 pauses, 1 offloads the weights, 2 drops them."""
        self._cannot("sleep")

    async def release_kv_cache_memory(self) -> None:
        """Free the KV cache while asleep."""
        self._cannot("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep` for `weights`, `kv_cache`, `scheduling`, or all."""
        self._cannot("wake_up")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        self._cannot("add_lora")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating: `abort` running requests, `wait` for them or `keep` them."""
        self._cannot("pause_generation")

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        self._cannot("resume_generation")

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: int = 300) -> None:
        """Change the number of data-parallel engines."""
        self._cannot("scale_elastic_ep")

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        """A checksum per weight, for each worker."""
        self._cannot("compute_weight_checksums")

    async def handle_fault(self, fault_tolerance_request: Any) -> Any:
        """Act on a fault-tolerance instruction."""
        self._cannot("handle_fault")

    async def get_status(self) -> Any:
        """The fault-tolerance state."""
        self._cannot("get_status")

    async def init_weight_transfer_engine(self, init_request: Any) -> None:
        """Set up receiving weights."""
        self._cannot("init_weight_transfer_engine")

    async def shutdown_weight_transfer_engine(self) -> None:
        """End receiving weights."""
        self._cannot("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin replacing the weights."""
        self._cannot("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        """Replace some weights."""
        self._cannot("update_weights")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End replacing the weights."""
        self._cannot("finish_weight_update")

    async def update_weight_version(self, new_version: str) -> None:
        """Label the weights."""
        self._cannot("update_weight_version")

    async def get_weight_version(self) -> str:
        """The label of the weights."""
        self._cannot("get_weight_version")

    def _cannot(self, method: str) -> NoReturn:
        raise NotImplementedError(f"{method} is not available in this engine")
