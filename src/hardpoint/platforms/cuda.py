"""NVIDIA devices through torch.cuda. Written from torch's documentation; not verified on every card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.contracts.platform import DeviceCapability, Platform, PlatformEnum
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref
from hardpoint.platforms.attention_choice import choose_attention

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

WORKER = "hardpoint.worker.device_worker.Worker"
# Best first; the last runs on any device.
ATTENTION = ("TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA")
COMMUNICATOR = "hardpoint.worker.distributed.communicators.CudaCommunicator"


def _cuda(name: str) -> Any:
    return load_ref(f"torch.cuda:{name}")


class CudaPlatform(Platform):
    """NVIDIA devices."""

    _enum = PlatformEnum.CUDA
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
    ray_device_key = "GPU"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """The compute capability, None when there is no device."""
        if not _cuda("is_available")():
            return None
        return DeviceCapability(*_cuda("get_device_capability")(device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The card's name."""
        return _cuda("get_device_name")(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """The card's UUID."""
        return str(_cuda("get_device_properties")(device_id).uuid)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory."""
        return _cuda("get_device_properties")(device_id).total_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Streaming multiprocessors."""
        return _cuda("get_device_properties")(device_id).multi_processor_count

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Make `device` the current one."""
        _cuda("set_device")(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed every card's generator."""
        _cuda("manual_seed_all")(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        """Raise ConfigError (a ValueError) for bfloat16 on cards before Ampere."""
        if str(dtype).endswith("bfloat16") and not cls.has_device_capability(80):
            raise ConfigError("this card cannot compute with bfloat16", code="config-dtype", fix="use --dtype float16")

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Peak bytes that torch allocated on the device."""
        return float(_cuda("max_memory_allocated")(device))

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Host memory can be pinned."""
        return True

    @classmethod
    def supports_fp8(cls) -> bool:
        """From Ada on."""
        return cls.has_device_capability(89)

    @classmethod
    def compiles_by_default(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Yes, with CUDA graphs."""
        return True

    @classmethod
    def compiles_triton(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The named backend, else the first of ours that can compute the layer; see `choose_attention`."""
        return choose_attention(cls, selected_backend, attn_selector_config, ATTENTION)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Nccl's."""
        return COMMUNICATOR

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Set worker class and block size."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = vllm_config.cache_config.DEFAULT_BLOCK_SIZE
