"""What a platform is: the device kind, its facts, and the hooks through which it shapes the configuration.

No torch here: methods that need it import it through a reference when they are called.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.platform_kinds import CpuArchEnum, DeviceCapability, PlatformEnum, cpu_architecture
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref
from hardpoint.log import init_logger

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)


class _PlatformType(type):
    """Makes an unknown attribute of a platform class an error that names it (vLLM answers None)."""

    def __getattr__(cls, name: str) -> Any:
        return _from_torch(cls, name)


def _from_torch(cls: Any, name: str) -> Any:
    """`current_platform.Event` is `torch.<device_type>.Event`, where torch has it."""
    device_type = cls.__dict__.get("device_type") or next(
        (base.__dict__["device_type"] for base in cls.__mro__ if "device_type" in base.__dict__), ""
    )
    torch = sys.modules.get("torch")
    if torch is not None and not name.startswith("_"):
        device_module = getattr(torch, device_type, None)
        if device_module is not None and hasattr(device_module, name):
            return getattr(device_module, name)
    raise AttributeError(f"platform {cls.__qualname__} has no attribute {name!r}, and neither has torch.{device_type}")


class Platform(metaclass=_PlatformType):
    """A device kind.

    Built   once per process, at the first use of `current_platform`, before the general plugins.
    Called  the hooks at the moments that the table of extension points states.
    Fault   an exception of a hook stops the process that called it.

    Required: `_enum`, `device_name`, `device_type`, `check_and_update_config` (sets
    `parallel_config.worker_cls`) and `get_attn_backend_cls`. Hooks that write the configuration run
    in the front end and again in the engine core, so a second run must change nothing.
    """

    _enum: PlatformEnum
    device_name: str
    device_type: str
    dispatch_key: str = "CPU"
    device_control_env_var: str = "HARDPOINT_NO_DEVICE_VARIABLE"
    ray_device_key: str = ""
    ray_noset_device_env_vars: list[str] = []
    simple_compile_backend: str = "inductor"
    dist_backend: str = ""
    supported_quantization: list[str] = []
    additional_env_vars: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _from_torch(type(self), name)

    @property
    def pass_key(self) -> str:
        """The inductor option that takes our graph passes."""
        return "post_grad_custom_post_pass"

    @property
    def supported_dtypes(self) -> list[Any]:
        """Number formats of the device, best first."""
        return [load_ref(f"torch:{name}") for name in ("bfloat16", "float16", "float32")]

    # Identity.

    @classmethod
    def is_cuda(cls) -> bool:
        """Whether this is NVIDIA."""
        return cls._enum is PlatformEnum.CUDA

    @classmethod
    def is_rocm(cls) -> bool:
        """Whether this is AMD."""
        return cls._enum is PlatformEnum.ROCM

    @classmethod
    def is_tpu(cls) -> bool:
        """Whether this is a TPU."""
        return cls._enum is PlatformEnum.TPU

    @classmethod
    def is_xpu(cls) -> bool:
        """Whether this is an Intel GPU."""
        return cls._enum is PlatformEnum.XPU

    @classmethod
    def is_cpu(cls) -> bool:
        """Whether this is the host processor."""
        return cls._enum is PlatformEnum.CPU

    @classmethod
    def is_zen_cpu(cls) -> bool:
        """Whether this is an AMD processor with its own kernels."""
        return False

    @classmethod
    def is_out_of_tree(cls) -> bool:
        """Whether a plugin brought this platform."""
        return cls._enum is PlatformEnum.OOT

    @classmethod
    def is_unspecified(cls) -> bool:
        """Whether no device was found."""
        return cls._enum is PlatformEnum.UNSPECIFIED

    @classmethod
    def is_cuda_alike(cls) -> bool:
        """Whether torch.cuda drives this."""
        return cls._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    @classmethod
    def log_warnings(cls) -> None:
        """Log what a user of this machine should know; called when logging is set up."""

    # Devices.

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """The compute capability, None where there is no such thing."""
        return None

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device has at least this capability, as (9, 0) or 90."""
        found = cls.get_device_capability(device_id)
        return found is not None and found >= DeviceCapability.of(capability)

    @classmethod
    def is_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device has exactly this capability."""
        found = cls.get_device_capability(device_id)
        return found is not None and found == DeviceCapability.of(capability)

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """Whether the device's major capability is that of `capability`."""
        found = cls.get_device_capability(device_id)
        return found is not None and found.major == capability // 10

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The device's name."""
        raise _missing(cls, "get_device_name")

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """A name no other device has."""
        raise _missing(cls, "get_device_uuid")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of device memory."""
        raise _missing(cls, "get_device_total_memory")

    @classmethod
    def get_all_gpu_pci_bus_ids(cls) -> list[str]:
        """PCI addresses of all devices."""
        raise _missing(cls, "get_all_gpu_pci_bus_ids")

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: int) -> int:
        """Map a position in the device variable (such as CUDA_VISIBLE_DEVICES) to the device's number."""
        chosen = os.environ.get(cls.device_control_env_var, "")
        if not chosen:
            return device_id
        number = chosen.split(",")[device_id].strip()
        if not number.isdigit():
            raise ConfigError(
                f"{cls.device_control_env_var}={chosen!r} names devices in a form that has no number: {number!r}",
                code="env-value",
            )
        return int(number)

    @classmethod
    def logical_device_id_to_visible_device_id(cls, device_id: int) -> int:
        """Map a rank's device to its position among the visible ones."""
        return device_id

    @classmethod
    def set_device(cls, device: Any) -> None:
        """Make `device` the current one."""
        raise _missing(cls, "set_device")

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed every device's generator."""
        raise _missing(cls, "manual_seed_all")

    @classmethod
    def seed_everything(cls, seed: int | None = None) -> None:
        """Seed Python, torch and the devices."""
        if seed is not None:
            random.seed(seed)
            load_ref("torch:manual_seed")(seed)
            cls.manual_seed_all(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        """A context manager inside which nothing records gradients."""
        return load_ref("torch:inference_mode")(mode=True)

    @classmethod
    def check_if_supports_dtype(cls, dtype: Any) -> None:
        """Raise ValueError for a torch dtype that the device cannot compute with."""
        raise _missing(cls, "check_if_supports_dtype")

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes of device memory in use by this process."""
        raise _missing(cls, "get_current_memory_usage")

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Multiprocessors of the device."""
        raise _missing(cls, "num_compute_units")

    @classmethod
    def is_integrated_gpu(cls, device_id: int = 0) -> bool:
        """Whether device and host share memory."""
        return False

    @classmethod
    def enable_multi_stream_overlap(cls, *args: Any, **kwargs: Any) -> bool:
        """Whether work may overlap on several streams."""
        return False

    @classmethod
    def is_sleep_mode_available(cls) -> bool:
        """Whether device memory can be given back and taken again."""
        return False

    @classmethod
    def is_cumem_allocator_available(cls) -> bool:
        """Whether the CUDA virtual-memory allocator works here."""
        return False

    @classmethod
    def uses_host_device_handling(cls) -> bool:
        """Whether tensors are made on the host first."""
        return False

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Whether host memory can be pinned for faster copies."""
        return False

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        """The host's processor family."""
        return cpu_architecture()

    # Configuration hooks.

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Add flags to `parser`, or register things.

        Called with every full parser that is built, and without one at the start of `create_engine_config`.
        """

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Look at the VLLM_* variables of the process.

        One that nothing reads here is a warning; an unknown one too, or a `ConfigError` if `hard_fail`.
        """
        for name in envs.unread():
            logger.warning("environment variable %s is set, but this version does not read it", name)
        for name in envs.unknown():
            near = load_ref("hardpoint.config.sections:near_miss")(name, dir(envs))
            what = f"environment variable {name} is not known{near}"
            if hard_fail:
                raise ConfigError(what, code="env-unknown", origin="the process environment", fix=f"unset {name}")
            logger.warning("%s", what)

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Set defaults before options are decided. Runs twice; see the class."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Set the worker class, refuse what the device cannot do, normalise. Runs twice; see the class."""

    @classmethod
    def default_dtype(cls, checkpoint_dtype: str | None) -> str:
        """Ours: the number format that `--dtype auto` means for a checkpoint, by name.

        checkpoint_dtype  what the model's config states, such as "bfloat16"; None when it does not say
        """
        if cls.device_type == "cpu":
            return "float32"
        return checkpoint_dtype if checkpoint_dtype in ("float16", "bfloat16") else "float16"

    @classmethod
    def check_max_model_len(cls, max_model_len: int) -> int:
        """Return the context length that the device can serve."""
        return max_model_len

    @classmethod
    def get_max_output_tokens(cls, prompt_len: int) -> int:
        """Return how many tokens may follow a prompt of `prompt_len` tokens."""
        return sys.maxsize

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Raise ValueError for a model class that the device cannot run."""

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Raise ConfigError (a ValueError) for a quantisation method that the device cannot run."""
        if cls.supported_quantization and quant not in cls.supported_quantization:
            raise ConfigError(
                f"quantization {quant!r} is not supported on {cls.device_name}",
                code="config-quantization",
                fix=f"supported here: {', '.join(cls.supported_quantization)}",
            )

    @classmethod
    def validate_request(cls, prompt: Any, params: Any) -> None:
        """Raise ValueError to refuse a request."""

    # Compilation.

    @classmethod
    def get_compile_backend(cls) -> str:
        """The torch.compile backend for models."""
        return cls.simple_compile_backend

    @classmethod
    def compiles_by_default(cls) -> bool:
        """Ours: whether models are compiled unless the user says otherwise."""
        return False

    @classmethod
    def compiles_triton(cls) -> bool:
        """Ours: whether Triton compiles kernels for the device."""
        return False

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        """Dotted name of the graph pass manager; empty when there is none."""
        return ""

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """Dotted name of the device-graph wrapper; empty when there is none."""
        return ""

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Whether steps can be captured in device graphs."""
        return False

    # Attention and cache.

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Dotted name of the attention backend class for a layer.

        selected_backend      what the user named, or None
        attn_selector_config  facts of the layer: head size, dtypes, block size, kind
        Raises ValueError when the named backend cannot serve it.
        """
        return ""

    @classmethod
    def get_vit_attn_backend(cls, head_size: int, dtype: Any, backend: Any = None) -> Any:
        """The attention backend of vision towers."""
        return backend or "TORCH_SDPA"

    @classmethod
    def get_supported_vit_attn_backends(cls) -> list[Any]:
        """The attention backends that vision towers may use."""
        return ["TORCH_SDPA"]

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Adapt `cache_config.block_size` to the attention backend; called right after the model is loaded."""

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        """Register the device's own kinds of KV cache; called before the cache is planned."""

    @classmethod
    def get_kv_cache_config_builder_cls(cls) -> str | None:
        """Dotted name of a class that plans the KV cache in place of ours, None for ours."""
        return None

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Whether layers may have caches of several shapes."""
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Whether attention is one opaque op to the compiler."""
        return False

    # Kernels.

    @classmethod
    def import_kernels(cls) -> None:
        """Import the device's kernels; called once before the first is used."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Import implementations of replaceable ops."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace Triton kernels; called at the start of a worker, after the general plugins."""

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: VllmConfig) -> dict[str, list[str]]:
        """Op name to implementations, best first."""
        return {}

    @classmethod
    def supports_fp8(cls) -> bool:
        """Whether 8-bit floats are computed with."""
        return False

    @classmethod
    def is_fp8_fnuz(cls) -> bool:
        """Whether 8-bit floats have no negative zero."""
        return False

    @classmethod
    def fp8_dtype(cls) -> Any:
        """The torch dtype of 8-bit floats."""
        return load_ref("torch:float8_e4m3fn")

    @classmethod
    def supports_mx(cls) -> bool:
        """Whether microscaling formats are computed with."""
        return False

    @classmethod
    def support_deep_gemm(cls) -> bool:
        """Whether DeepGEMM runs here."""
        return False

    @classmethod
    def is_arch_support_pdl(cls) -> bool:
        """Whether dependent kernels may start early."""
        return False

    # Distribution.

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Dotted name of the class that groups of several ranks talk through."""
        return "hardpoint.contracts.device_communicator.DeviceCommunicatorBase"

    @classmethod
    def use_all_gather(cls) -> bool:
        """Whether logits are collected by all-gather instead of gather."""
        return True

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """Whether a kernel of our own sums over ranks."""
        return False

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Whether collectives are ops that the compiler keeps whole."""
        return False

    @classmethod
    def stateless_init_device_torch_dist_pg(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a process group outside torch's global state."""
        raise _missing(cls, "stateless_init_device_torch_dist_pg")

    # Adapters and the rest.

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Dotted name of the class that applies adapters."""
        raise _missing(cls, "get_punica_wrapper")

    @classmethod
    def can_update_inplace(cls) -> bool:
        """Whether adapter results may be added in place."""
        return True

    @classmethod
    def get_infinity_values(cls, dtype: Any) -> tuple[float, float]:
        """The values that stand for minus and plus infinity."""
        return float("-inf"), float("inf")

    @classmethod
    def set_additional_forward_context(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what is added to every forward context."""
        return {}

    @classmethod
    def use_sync_weight_loader(cls) -> bool:
        """Whether weights must be copied one after the other."""
        return False

    @classmethod
    def make_synced_weight_loader(cls, original_weight_loader: Any) -> Any:
        """Wrap a weight loader so that each copy is finished before the next."""
        return original_weight_loader

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        """Device kinds that NIXL can move memory between."""
        return {}

    @classmethod
    def get_nixl_memory_type(cls) -> str | None:
        """NIXL's name of this device's memory."""
        return None


class UnspecifiedPlatform(Platform):
    """No device: what a process has that found none. Anything that needs one refuses."""

    _enum = PlatformEnum.UNSPECIFIED
    device_name = "unspecified"
    device_type = ""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse to run a model."""
        raise ConfigError(
            "no device was found that can run a model",
            code="platform-none",
            fix="install a platform plugin, or set VLLM_TARGET_DEVICE=cpu",
        )


def _missing(cls: type, method: str) -> NotImplementedError:
    return NotImplementedError(f"platform {cls.__qualname__} does not say {method}")
