"""The platform: what its device is called, what it can do, how it wants a server configured, and its parts by path.

Nothing here imports torch: the front end asks the platform too.
"""

import os
from typing import Any

from hardpoint.contracts.platform import Platform, PlatformEnum
from hardpoint.extensions.refs import load_ref
from hardpoint.platforms import memory

_PACKAGE = "acme_platforms"
BLOCK_SIZE = 32
CACHE_BYTES = 1 << 30


class AcmePlatform(Platform):
    """The host processor as a device of our own: torch calls it `cpu`, and everything above torch is ours."""

    _enum = PlatformEnum.OOT
    device_name = "acme"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "ACME_VISIBLE_DEVICES"

    # -- facts -------------------------------------------------------------------------------------

    @property
    def supported_dtypes(self) -> list[Any]:
        """Best first."""
        return [load_ref(f"torch:{name}") for name in ("float32", "bfloat16", "float16")]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The device's name."""
        return "acme device"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory."""
        return memory.total_bytes()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes in use by this process."""
        return float(memory.resident_bytes())

    @classmethod
    def set_device(cls, device: Any) -> None:
        """There is one."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the device's generator."""
        load_ref("torch:manual_seed")(seed)

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        """All of torch's float formats."""

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Refuse what the device cannot run."""
        if "Mamba" in model_arch:
            raise ValueError(f"{model_arch} cannot run on {cls.device_name}: it has no state-space kernels")

    # -- the configuration: these run in the front end and again in the engine core, so they look before they write ---

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Add a flag to each parser that is built; without one, before the configuration is made."""
        if parser is not None:
            parser.add_argument("--acme-device-level", type=int, default=1, help="how hard the device works")

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Look at our variables, then at the others."""
        chosen = os.environ.get(cls.device_control_env_var, "0")
        if chosen != "0":
            raise ValueError(f"{cls.device_control_env_var} is {chosen!r}: there is one device, 0")
        super().validate_environ(hard_fail)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Larger cache blocks, unless the user says otherwise."""
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = BLOCK_SIZE

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Name the worker, and say how much memory there is for the cache."""
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = f"{_PACKAGE}.worker.AcmeDeviceWorker"
        if vllm_config.cache_config.kv_cache_memory_bytes is None:
            vllm_config.cache_config.kv_cache_memory_bytes = CACHE_BYTES

    # -- parts, by path ----------------------------------------------------------------------------

    @classmethod
    def import_kernels(cls) -> None:
        """Once in each process that computes, before a model is built: define our ops for torch."""
        load_ref(f"{_PACKAGE}.kernels:rotate")

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """At the start of a worker: put our layers in the place of the built-in ones. (We have no Triton.)"""
        load_ref(f"{_PACKAGE}.ops:register")()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The user's choice, if it can compute the layer, else ours."""
        path = f"{_PACKAGE}.attention.AcmeDeviceAttention"
        backend = load_ref(path.replace(".Acme", ":Acme")) if selected_backend is None else selected_backend.get_class()
        reasons = backend.validate_configuration(**attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"{backend.get_name()} cannot be used on {cls.device_name}: {'; '.join(reasons)}")
        return path if selected_backend is None else selected_backend.get_path()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Once the model is loaded: hold the block size against the backend."""
        size = vllm_config.cache_config.block_size
        if size % 8:
            raise ValueError(f"blocks of {size} tokens: {cls.device_name} wants a multiple of 8")

    @classmethod
    def get_kv_cache_config_builder_cls(cls) -> str:
        """Who plans the cache."""
        return f"{_PACKAGE}.cache.AcmeDeviceCacheBuilder"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """How ranks exchange tensors."""
        return f"{_PACKAGE}.communicator.AcmeDeviceCommunicator"
