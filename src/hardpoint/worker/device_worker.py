"""The built-in worker: one device, one model, one runner."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import nn

from hardpoint.config.sections import CompilationMode
from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.contracts.worker import CompilationTimes, WorkerBase
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.schedule import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from hardpoint.worker import runner
from hardpoint.worker.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from hardpoint.worker.graphs import CudaCapture, wants_graphs
from hardpoint.worker.kernels.library import kernels
from hardpoint.worker.lora.manager import AdapterManager, not_enabled

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)


class Worker(WorkerBase):
    """Runs a model on the platform's device."""

    def init_device(self) -> None:
        """Take the device and its threads, join the other ranks and make the runner."""
        platform = self.current_platform
        self.device = torch.device(platform.device_type)
        if self.device.type == "cpu":
            set_threads(self.vllm_config, self.local_rank)
        else:
            self.device = torch.device(platform.device_type, _index_on_node(self.vllm_config, self.local_rank))
            platform.set_device(self.device)
        self.model_config.dtype = _torch_dtype(self.model_config.dtype)
        platform.check_if_supports_dtype(self.model_config.dtype)
        platform.seed_everything(self.model_config.seed)
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.device.index or 0, platform.dist_backend,
            _seconds(parallel.distributed_timeout_seconds), _seconds(parallel.cpu_distributed_timeout),
        )  # fmt: skip
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        # Looked up here: a plugin may have put a class of its own in its place.
        self.model_runner: runner.ModelRunner = runner.ModelRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model and read its weights."""
        started = time.perf_counter()
        self.model_runner.load_model(load_dummy_weights)
        logger.info("the model is loaded in %.2f s", time.perf_counter() - started)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer stores."""
        return self.model_runner.get_kv_cache_spec()

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: what the configuration says, else the device's share that is left."""
        given = self.cache_config.kv_cache_memory_bytes
        if given is not None:
            return given
        platform = self.current_platform
        total = platform.get_device_total_memory(self.local_rank)
        used = platform.get_current_memory_usage(self.device)
        left = int(total * self.cache_config.gpu_memory_utilization - used)
        if left <= 0:
            raise ConfigError(
                f"the model takes {used / 2**30:.2f} GiB, more than the share of {total / 2**30:.2f} GiB "
                f"that gpu_memory_utilization={self.cache_config.gpu_memory_utilization} allows",
                code="kv-cache-memory",
                fix="raise --gpu-memory-utilization or give --kv-cache-memory-bytes",
            )
        return left

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV cache."""
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Run once, which compiles the parts of the model that are to be; returns how long that took, in seconds."""
        started = time.perf_counter()
        self.model_runner.warm_up()
        if wants_graphs(self.vllm_config):
            self.model_runner.capture_graphs(CudaCapture())
        if self.compilation_config.mode in (None, CompilationMode.NONE):
            return CompilationTimes(0.0, 0.0)
        seconds = time.perf_counter() - started
        logger.info("the model is compiled in %.1f s", seconds)
        return CompilationTimes(seconds, 0.0)

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take the length that was chosen to fit memory."""
        self.model_config.max_model_len = max_model_len
        self.model_runner.update_max_model_len(max_model_len)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step."""
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose tokens for the step that `execute_model` left open."""
        return self.model_runner.sample_tokens(grammar_output)

    def execute_dummy_batch(self) -> None:
        """Run a step without requests: the warm-up's."""
        self.model_runner.warm_up()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do."""
        return self.model_runner.get_supported_tasks()

    def _adapters(self) -> AdapterManager:
        adapters = self.model_runner.adapters
        if adapters is None:
            raise not_enabled()
        return adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; whether it was not there before. ModelFileError when it cannot be."""
        return self._adapters().add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; whether it was there."""
        return self._adapters().remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Whether the adapter is there. It stays: the engine core, which says which are to go, passes it over."""
        return lora_id in self._adapters().ids()

    def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        adapters = self.model_runner.adapters
        return set() if adapters is None else adapters.ids()

    def get_model(self) -> nn.Module:
        """The loaded model."""
        return self.model_runner.get_model()

    def compute_weight_checksums(self) -> dict[str, str]:
        """Parameter name -> SHA-256 of its bytes."""
        return {
            name: hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, parameter in self.get_model().named_parameters()
        }

    def check_health(self) -> None:
        """Nothing to ask a processor; a lost device raises in the next step."""

    def synchronize_device(self) -> None:
        """Wait until the device is idle."""
        if self.device is not None and self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()

    def shutdown(self) -> None:
        """Leave the other ranks."""
        destroy_model_parallel()
        destroy_distributed_environment()


def _seconds(limit: int | None) -> timedelta | None:
    return None if limit is None else timedelta(seconds=limit)


def _index_on_node(vllm_config: VllmConfig, local_rank: int) -> int:
    """The rank's place among those of all replicas on this machine."""
    parallel = vllm_config.parallel_config
    return (parallel.data_parallel_rank_local or 0) * parallel.local_world_size + local_rank


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype {dtype!r} is not a number format", code="config-dtype", fix="use e.g. float32")
    return found


def set_threads(vllm_config: VllmConfig, local_rank: int) -> int:
    """Give this rank its cores and threads; returns the number of threads.

    VLLM_CPU_OMP_THREADS_BIND lists the cores of each rank ("0-3|4-7"); with `auto` and `nobind` the ranks
    share the cores of the process evenly, less VLLM_CPU_NUM_OF_RESERVED_CPU. `--cpu-threads` sets the number.
    """
    parallel = vllm_config.parallel_config
    cores = _bound_cores(envs.VLLM_CPU_OMP_THREADS_BIND, _index_on_node(vllm_config, local_rank))
    ranks = max(1, parallel.local_world_size * max(1, parallel.data_parallel_size_local))
    if cores:
        os.sched_setaffinity(0, cores)
        number = len(cores)
    else:
        # OMP_NUM_THREADS and the number of physical cores are in torch's own default.
        free = _usable_cores() - (envs.VLLM_CPU_NUM_OF_RESERVED_CPU or 0)
        number = min(torch.get_num_threads(), max(1, free // ranks))
    number = vllm_config.device_config.cpu_threads or number
    torch.set_num_threads(number)
    library = kernels()
    if library is not None:
        # Threads beyond the cores that were named are not bound to one.
        library.set_threads(number, sorted(cores) if len(cores) >= number else None)
    logger.info("%d CPU thread%s%s", number, "" if number == 1 else "s", f" on cores {sorted(cores)}" if cores else "")
    return number


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bound_cores(text: str, local_rank: int) -> set[int]:
    """The cores that the variable gives this rank; empty when it leaves the choice to us."""
    if text in ("auto", "nobind", ""):
        return set()
    parts = text.split("|")
    wrong = ConfigError(
        f"VLLM_CPU_OMP_THREADS_BIND={text!r} does not name cores for rank {local_rank}",
        code="env-value",
        origin="the process environment",
        fix="list cores per rank, ranks split by a bar, such as 0-3|4-7, or use auto or nobind",
    )
    if local_rank >= len(parts):
        raise wrong
    cores: set[int] = set()
    for piece in parts[local_rank].split(","):
        first, _, last = piece.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise wrong
        cores.update(range(int(first), int(last or first) + 1))
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else cores
    if not cores or not cores <= usable:
        raise wrong
    return cores
