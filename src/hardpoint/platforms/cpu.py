"""The host processor as the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.platform import Platform, PlatformEnum
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger
from hardpoint.platforms import memory
from hardpoint.platforms.attention_choice import choose_attention

if TYPE_CHECKING:
    from hardpoint.config.sections import CacheConfig, VllmConfig

logger = init_logger(__name__)

WORKER = "hardpoint.worker.device_worker.Worker"
# Best first.
ATTENTION = ("CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION")
COMMUNICATOR = "hardpoint.worker.distributed.communicators.CpuCommunicator"
DEFAULT_SHARE = 0.92
DEFAULT_CAP_BYTES = 4 << 30
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


class CpuPlatform(Platform):
    """The host processor. Weights, cache and kernels are in main memory."""

    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"

    @property
    def supported_dtypes(self) -> list[Any]:
        """Float32 first: it is the exact path, and half formats are slow on most processors."""
        return [load_ref(f"torch:{name}") for name in ("float32", "bfloat16", "float16")]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The processor's model name."""
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """One name: there is one processor."""
        return f"cpu-{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Main memory in bytes, within a container's limit."""
        return memory.total_bytes()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes that this process holds."""
        return float(memory.resident_bytes())

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Processors that this process may run on."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Nothing to choose."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed torch's generator."""
        load_ref("torch:manual_seed")(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        """Raise ConfigError (a ValueError) for number formats without kernels here."""
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise ConfigError(f"dtype {name!r} cannot be computed with on a CPU", code="config-dtype")

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The named backend, else the first of ours that can compute the layer; see `choose_attention`."""
        return choose_attention(cls, selected_backend, attn_selector_config, ATTENTION)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Gloo's."""
        return COMMUNICATOR

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Set worker class, block size and cache size; refuse compiled modes."""
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        parallel.disable_custom_all_reduce = True
        if cache.block_size is None:
            cache.block_size = cache.DEFAULT_BLOCK_SIZE
        if cache.kv_cache_memory_bytes is None and vllm_config.model_config is not None:
            cache.kv_cache_memory_bytes = _cache_bytes(vllm_config)
        if vllm_config.model_config is not None:
            cls.check_if_supports_dtype(vllm_config.model_config.dtype)


def _cache_bytes(vllm_config: VllmConfig) -> int:
    """Choose the size of the KV cache of one rank, in bytes.

    VLLM_CPU_KVCACHE_SPACE (GiB) decides where it is set. Else: the memory share that the user asks for,
    never more than all requests together can fill; and without an explicit share at most 4 GiB, or what
    one request of full length needs if that is more, so that a server leaves the machine usable.
    """
    space = envs.VLLM_CPU_KVCACHE_SPACE
    if space is not None and space > 0:
        return space << 30
    model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
    per_token = bytes_per_token(vllm_config)
    # One spare block per request: lengths are rounded up to blocks.
    longest = (model.max_model_len or 1) + (cache.block_size or cache.DEFAULT_BLOCK_SIZE)
    parallel = vllm_config.parallel_config
    replicas = max(1, parallel.data_parallel_size_local)
    ranks = parallel.local_world_size * replicas
    share = int(memory.available_bytes() * cache.gpu_memory_utilization - replicas * _weight_bytes(model)) // ranks
    sizes = [share, per_token * longest * scheduler.max_num_seqs]
    if cache.gpu_memory_utilization == DEFAULT_SHARE:
        sizes.append(max(DEFAULT_CAP_BYTES, per_token * longest))
    return max(min(sizes), per_token * _smallest(cache))


def _smallest(cache: CacheConfig) -> int:
    """Tokens of the least cache worth starting with; whether a request fits is checked when blocks are planned."""
    return 2 * (cache.block_size or cache.DEFAULT_BLOCK_SIZE)


def bytes_per_token(vllm_config: VllmConfig) -> int:
    """Bytes of KV cache for one token on one rank, over all its layers."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    name = model.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    number = DTYPE_BYTES.get(str(name).removeprefix("torch."), 4)
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    if name == "int8_per_token_head":
        # A byte for each number, and a factor for each head.
        number, heads = 1, heads + 4 * model.get_num_kv_heads(parallel)
    return max(1, 2 * model.get_num_layers(parallel) * heads * number)


def _weight_bytes(model: Any) -> int:
    """Estimate what the weights take in memory: their files, twice for formats that are widened."""
    path = Path(model.local_path)
    if path.is_file():
        return path.stat().st_size
    return 2 * sum(file.stat().st_size for file in path.glob("*.safetensors") if file.is_file())
