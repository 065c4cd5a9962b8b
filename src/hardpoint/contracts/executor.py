"""How the engine core reaches its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.errors import ConfigError, reason_of
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.schedule import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

FailureCallback = Callable[[], None]

_BUILT_IN = {
    "uni": "hardpoint.engine_core.executors.uni:UniProcExecutor",
    "mp": "hardpoint.engine_core.executors.mp:MultiprocExecutor",
    "ray": "hardpoint.engine_core.executors.ray_actors:RayExecutor",
    "external_launcher": "hardpoint.engine_core.executors.external:ExternalLauncherExecutor",
}


class Executor(ABC):
    """Runs the workers; `--distributed-executor-backend` names a class.

    Built   once in the engine core; the constructor returns with every model loaded.
    Called  by the engine core's loop, one call at a time.
    Fault   an error of `execute_model` or `sample_tokens` ends the engine core; one of `collective_rpc`
            goes to its caller; a worker that ends by itself is reported through the failure callback.
    """

    uses_ray: bool = False
    supports_pp: bool = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.cache_config = vllm_config.cache_config
        self.lora_config = vllm_config.lora_config
        self.load_config = vllm_config.load_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.device_config = vllm_config.device_config
        self.speculative_config = vllm_config.speculative_config
        self.observability_config = vllm_config.observability_config
        self.is_sleeping = False
        self.sleeping_tags: set[str] = set()
        self.kv_output_aggregator: Any = None
        self._init_executor()

    @staticmethod
    def get_class(vllm_config: VllmConfig) -> type[Executor]:
        """The class that `parallel_config.distributed_executor_backend` stands for.

        A class, a built-in name or a dotted path. TypeError for what is not an Executor, ConfigError for a
        name that cannot be resolved, and for pipeline stages that the class does not support.
        """
        parallel = vllm_config.parallel_config
        backend = parallel.distributed_executor_backend or ("uni" if parallel.world_size == 1 else "mp")
        found = _load_backend(backend) if isinstance(backend, str) else backend
        if not (isinstance(found, type) and issubclass(found, Executor)):
            raise TypeError(f"distributed_executor_backend must be a subclass of Executor, got {found!r}")
        if parallel.pipeline_parallel_size > 1 and not found.supports_pp:
            raise ConfigError(
                f"the executor {found.__module__}.{found.__qualname__} has no pipeline stages (supports_pp is False)",
                code="executor-pipeline",
                fix="leave --pipeline-parallel-size out, or use mp or ray",
            )
        return found

    @abstractmethod
    def _init_executor(self) -> None:
        """Start the workers, initialise their devices and load the model."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a method of every worker, by name or as a function that gets the worker.

        timeout    seconds; TimeoutError past it
        non_block  return a `concurrent.futures.Future` of the list instead of the list
        Returns the results in rank order; a worker's error is raised with its type and text.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise when a worker is gone."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether a step may be handed over while another one runs: `non_block` returns futures that do not block,
        and the workers take steps and calls in the order in which they come."""
        return False

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be in flight at once; more than 1: the engine core calls with `non_block`."""
        if self.scheduler_config.async_scheduling:
            return 2
        return self.parallel_config.pipeline_parallel_size if self.supports_pp else 1

    @property
    def step_timeout_s(self) -> float | None:
        """How long the engine core waits for the result of a step in flight, in seconds; None = for ever."""
        return None

    def register_failure_callback(self, callback: FailureCallback) -> None:  # noqa: B027 - optional
        """Have `callback` called, from any thread, when a worker ends by itself."""

    def init_kv_output_aggregator(self, connector: Any) -> None:  # noqa: B027 - optional
        """Prepare to merge the workers' KV connector outputs."""

    def init_ec_output_aggregator(self) -> None:  # noqa: B027 - optional
        """Prepare to merge the workers' encoder-cache connector outputs."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Per worker: layer name -> what it stores."""
        return self.collective_rpc("get_kv_cache_spec")

    def determine_available_memory(self) -> list[int]:
        """Per worker: bytes free for the KV cache."""
        return self.collective_rpc("determine_available_memory")

    def update_max_model_len(self, max_model_len: int) -> None:
        """Tell the workers the length that was chosen to fit memory."""
        self.collective_rpc("update_max_model_len", args=(max_model_len,))

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        """Have every worker allocate by its plan (each takes the one of its rank) and warm up."""
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))
        self.compile_or_warm_up_model()

    def compile_or_warm_up_model(self) -> None:
        """Compile and run once."""
        self.collective_rpc("compile_or_warm_up_model")

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Run a step; None means that `sample_tokens` must follow. `non_block`: return a future of it."""
        return _first(self.collective_rpc("execute_model", args=(scheduler_output,), non_block=non_block))

    def sample_tokens(
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        """Sample for the step that `execute_model` left open. `non_block`: return a future of it."""
        return _first(self.collective_rpc("sample_tokens", args=(grammar_output,), non_block=non_block))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The draft tokens of the last step."""
        return self.collective_rpc("take_draft_token_ids")[0]

    def execute_dummy_batch(self) -> None:
        """Run a step without requests, to keep pace with other replicas."""
        self.collective_rpc("execute_dummy_batch")

    @cached_property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do, e.g. ("generate",)."""
        return tuple(self.collective_rpc("get_supported_tasks")[0])

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on every worker."""
        return all(self.collective_rpc("add_lora", args=(lora_request,)))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        return all(self.collective_rpc("remove_lora", args=(lora_id,)))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter resident."""
        return all(self.collective_rpc("pin_lora", args=(lora_id,)))

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        return set(self.collective_rpc("list_loras")[0])

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the workers' profilers."""
        self.collective_rpc("profile", args=(is_start, profile_prefix))

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Have every worker write its part of the weights."""
        self.collective_rpc("save_sharded_state", kwargs={"path": path, "pattern": pattern, "max_size": max_size})

    def reset_mm_cache(self) -> None:
        """Drop the workers' media caches."""
        self.collective_rpc("reset_mm_cache")

    def reset_encoder_cache(self) -> None:
        """Drop the workers' encoder outputs."""
        self.collective_rpc("reset_encoder_cache")

    def shutdown(self) -> None:
        """End the workers."""
        self.collective_rpc("shutdown")


def _first(answers: Any) -> Any:
    """Rank 0's answer, or a future of it."""
    if not isinstance(answers, Future):
        return answers[0]
    first: Future[Any] = Future()

    def pass_on(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            first.set_result(done.result()[0])
        else:
            first.set_exception(error)

    answers.add_done_callback(pass_on)
    return first


def _load_backend(name: str) -> Any:
    if name in _BUILT_IN:
        return load_ref(_BUILT_IN[name])
    try:
        return resolve_obj_by_qualname(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"distributed_executor_backend={name!r} cannot be loaded: {reason_of(error)}",
            code="executor-backend",
            fix=f"use {', '.join(_BUILT_IN)} or the dotted path of an Executor class",
        ) from error
