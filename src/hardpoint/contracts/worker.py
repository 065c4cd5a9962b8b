"""What runs the model on one device, and the wrapper an executor reaches it through."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hardpoint.config.current import set_current_vllm_config
from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.contracts.worker_calls import call_worker
from hardpoint.errors import ConfigError, StartError, reason_of
from hardpoint.extensions.boot import boot
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname
from hardpoint.extensions.rows import Role
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.schedule import (
    AsyncModelRunnerOutput,
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)

_PLATFORM = "hardpoint.platforms:current_platform"
_KERNELS = "hardpoint.platforms:import_kernels"


class CompilationTimes(NamedTuple):
    """Seconds spent compiling."""

    language_model: float
    encoder: float


class WorkerBase:
    """Runs the model on one device; `--worker-cls` and the platform name a class.

    Built   once per rank, in its own process or in the engine core's, after the general plugins, inside
            `set_current_vllm_config`. Building does nothing slow: `init_device` and `load_model` follow.
    Called  by the executor, one call at a time, in this order: init_device, load_model,
            get_kv_cache_spec, determine_available_memory, initialize_from_config,
            compile_or_warm_up_model, then execute_model and sample_tokens each step.
            Any method may be called by name through `collective_rpc`.
    Blocks  may: every call waits for the device.
    Fault   an error before serving stops the start; one of a step ends the engine core; one of any other
            call goes to its caller. What concerns one request is reported in `ModelRunnerOutput.request_errors`.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
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
        self.kv_transfer_config = vllm_config.kv_transfer_config
        self.compilation_config = vllm_config.compilation_config
        self.current_platform = load_ref(_PLATFORM)
        self.parallel_config.rank = rank
        self.local_rank = local_rank
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker
        self.device: Any = None
        self.model_runner: Any = None

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not implement {method!r}")

    def init_device(self) -> None:
        """Take the device, its threads and the rank's place among the others."""
        raise self._lacks("init_device")

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and read its weights (or leave random ones)."""
        raise self._lacks("load_model")

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer stores."""
        raise self._lacks("get_kv_cache_spec")

    def get_supported_kv_cache_layouts(self) -> list[str] | None:
        """Names of the cache layouts every layer takes, best first; None = the worker's own only."""
        return None

    def set_kv_cache_layout(self, layout: str) -> None:
        """Use the layout the engine core chose among those of all workers."""
        raise self._lacks("set_kv_cache_layout")

    def determine_available_memory(self) -> int:
        """Bytes free for the KV cache."""
        raise self._lacks("determine_available_memory")

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache and hand each layer its part."""
        raise self._lacks("initialize_from_config")

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile and run once, so that the first request does not wait for it."""
        raise self._lacks("compile_or_warm_up_model")

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take the length that was chosen to fit memory."""
        raise self._lacks("update_max_model_len")

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run a step; None = `sample_tokens` must follow."""
        raise self._lacks("execute_model")

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Choose tokens for the step that `execute_model` left open."""
        raise self._lacks("sample_tokens")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """The draft tokens of the last step; None = no drafter."""
        return None

    def execute_dummy_batch(self) -> None:
        """Run a step without requests, to keep pace with other replicas."""
        raise self._lacks("execute_dummy_batch")

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do, e.g. ("generate",)."""
        raise self._lacks("get_supported_tasks")

    def get_kv_connector_handshake_metadata(self) -> dict[int, Any] | None:
        """What other engines need to reach this rank's KV connector; None = no connector."""
        return None

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        raise self._lacks("add_lora")

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter."""
        raise self._lacks("remove_lora")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter resident."""
        raise self._lacks("pin_lora")

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        raise self._lacks("list_loras")

    def reset_mm_cache(self) -> None:
        """Drop cached media; nothing to do without any."""

    def reset_encoder_cache(self) -> None:
        """Drop cached encoder outputs; nothing to do without any."""

    def sleep(self, level: int = 1) -> None:
        """Free device memory."""
        raise self._lacks("sleep")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take device memory again."""
        raise self._lacks("wake_up")

    def discard(self, tags: list[str] | None = None) -> None:
        """Give up what sleeping memory held."""
        raise self._lacks("discard")

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop the profiler."""
        raise self._lacks("profile")

    def check_health(self) -> None:
        """Raise when the device does not answer."""

    def shutdown(self) -> None:
        """Give up what the worker holds."""

    def synchronize_device(self) -> None:
        """Wait until the device is idle; nothing to do where calls are synchronous."""

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write this rank's weights."""
        raise self._lacks("save_sharded_state")

    def compute_weight_checksums(self) -> dict[str, str]:
        """Parameter name -> digest of its bytes."""
        raise self._lacks("compute_weight_checksums")

    def get_model(self) -> nn.Module:
        """The loaded model."""
        raise self._lacks("get_model")

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """Call `fn` with the loaded model."""
        return fn(self.get_model())

    def get_model_inspection(self) -> str:
        """The loaded model's modules, printed."""
        return repr(self.get_model())

    def get_cache_block_size_bytes(self) -> int:
        """Bytes of one KV block over all layers."""
        return sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.model_config.get_vocab_size()


class WorkerWrapperBase:
    """Stands for a worker before there is one: loads plugins, finds its class, builds it.

    Any attribute it does not have is the worker's.

    rpc_rank     this worker's place in the lists that executors send
    global_rank  its rank in the world; `rpc_rank` unless given
    """

    def __init__(self, rpc_rank: int = 0, global_rank: int | None = None) -> None:
        self.rpc_rank = rpc_rank
        self.global_rank = rpc_rank if global_rank is None else global_rank
        self.worker: WorkerBase | None = None
        self.vllm_config: VllmConfig | None = None

    def init_worker(self, all_kwargs: Sequence[dict[str, Any]]) -> None:
        """Load this process's plugins and build the worker from the arguments of its rank.

        Raises ConfigError for a worker class that cannot be used, and whatever its constructor raises.
        """
        let_waiting_threads_sleep()
        boot(Role.WORKER)
        kwargs = all_kwargs[self.rpc_rank]
        vllm_config: VllmConfig = kwargs["vllm_config"]
        self.vllm_config = vllm_config
        load_ref(_KERNELS)()
        load_ref(_PLATFORM).register_triton_kernel_overrides()
        worker_class = _worker_class(vllm_config)
        with set_current_vllm_config(vllm_config):
            self.worker = worker_class(**kwargs)

    def init_device(self) -> None:
        """Initialise the worker's device."""
        assert self.vllm_config is not None, "init_worker comes first"
        with set_current_vllm_config(self.vllm_config):
            self._built().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, then let the platform settle the block size by the model's attention backends."""
        assert self.vllm_config is not None, "init_worker comes first"
        with set_current_vllm_config(self.vllm_config):
            self._built().load_model(**kwargs)
            load_ref(_PLATFORM).update_block_size_for_backend(self.vllm_config)

    def initialize_from_config(self, kv_cache_configs: Sequence[KVCacheConfig]) -> None:
        """Allocate by the plan of this rank."""
        assert self.vllm_config is not None, "init_worker comes first"
        with set_current_vllm_config(self.vllm_config):
            self._built().initialize_from_config(kv_cache_configs[self.global_rank])

    def execute_method(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method by name, or a function with the worker; NotImplementedError for an unknown name."""
        return call_worker(self, method, args, kwargs)

    def export_ledger(self) -> list[dict[str, Any]]:
        """The ledger of this worker's process, as plain dicts."""
        return ledger.export()

    def shutdown(self) -> None:
        """End the worker, if there is one."""
        if self.worker is not None:
            self.worker.shutdown()

    def _built(self) -> WorkerBase:
        if self.worker is None:
            raise StartError("the worker is not built yet", code="worker-order", fix="call init_worker first")
        return self.worker

    def __getattr__(self, name: str) -> Any:
        # Only reached for what the wrapper lacks. Unpickling and copying ask before __init__ has run.
        worker = self.__dict__.get("worker")
        if worker is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(worker, name)


def let_waiting_threads_sleep() -> None:
    """Settle how OpenMP's threads wait, unless the user did; read when torch is first imported.

    By default they spin, and on a machine whose cores are shared (with our own front end, for one) each of
    the hundreds of parallel regions of a step then waits for a core: steps take up to fifty times as long.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _worker_class(vllm_config: VllmConfig) -> type[WorkerBase]:
    """The class `parallel_config.worker_cls` names, with `worker_extension_cls` mixed in."""
    name = vllm_config.parallel_config.worker_cls
    found = _resolve(name, "worker_cls", "--worker-cls")
    extension_name = vllm_config.parallel_config.worker_extension_cls
    if not extension_name:
        return found
    return _extended(found, _resolve(extension_name, "worker_extension_cls", "--worker-extension-cls"))


def _resolve(name: Any, field: str, flag: str) -> type[Any]:
    origin = f"parallel_config.{field}, set by {_author_of(field)}"
    fix = f"give the dotted path of a class, such as my_package.workers.MyWorker ({flag})"
    if not isinstance(name, str):
        raise ConfigError(f"{field} must be a string, got {name!r}", code="worker-class", origin=origin, fix=fix)
    if name == "auto":
        platform = type(load_ref(_PLATFORM)).__name__
        raise ConfigError(
            f"{field} is still 'auto': the platform {platform} did not choose a worker class",
            code="worker-class",
            origin=origin,
            fix=f"set parallel_config.worker_cls in the platform's check_and_update_config, or use {flag}",
        )
    try:
        found = resolve_obj_by_qualname(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{field}={name!r} cannot be loaded: {reason_of(error)}", code="worker-class", origin=origin, fix=fix
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"{field}={name!r} is not a class", code="worker-class", origin=origin, fix=fix)
    return found


def _author_of(field: str) -> str:
    """Who wrote the field last, in words, as far as the ledger of this process knows."""
    labels = [entry.origin.label for entry in ledger.entries() if entry.name.endswith(field) and entry.origin]
    return labels[-1] if labels else "the configuration"


def _extended(worker_class: type[WorkerBase], extension: type[Any]) -> type[WorkerBase]:
    """A new class with both: nobody else's worker class changes.

    Raises ConfigError naming every attribute that both define.
    """
    if issubclass(worker_class, extension):
        return worker_class
    names = sorted(name for name in _members(extension) if not (name.startswith("__") and name.endswith("__")))
    clashes = [name for name in names if hasattr(worker_class, name)]
    if clashes:
        raise ConfigError(
            f"the worker extension {_path(extension)} defines {', '.join(clashes)}, "
            f"which the worker {_path(worker_class)} has already",
            code="worker-extension",
            origin="parallel_config.worker_extension_cls",
            fix="rename the methods of the extension",
        )
    if "__init__" in vars(extension):
        logger.warning("the worker extension %s has an __init__, which is not called", _path(extension))
    logger.info(
        "the worker %s is extended with %s for collective_rpc: %s",
        _path(worker_class), _path(extension), ", ".join(names),
    )  # fmt: skip
    return type(worker_class.__name__, (worker_class, extension), {"__module__": worker_class.__module__})


def _members(extension: type[Any]) -> set[str]:
    return {name for base in extension.__mro__ if base is not object for name in vars(base)}


def _path(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
