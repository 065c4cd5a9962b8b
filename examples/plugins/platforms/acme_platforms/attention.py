"""The attention backend: torch's own attention, with the block sizes of our device."""

from typing import Any

from hardpoint.contracts.attention_backend import MultipleOf
from hardpoint.worker.attention.sdpa import TorchSDPABackend, TorchSDPAImpl


class AcmeDeviceAttention(TorchSDPABackend):
    """See the example `attention_backends` for one that is written out."""

    @staticmethod
    def get_name() -> str:
        """The slot for backends without a name of their own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["AcmeDeviceAttentionImpl"]:
        """A layer's arithmetic."""
        return AcmeDeviceAttentionImpl

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """What the device reads at once."""
        return [MultipleOf(8)]


class AcmeDeviceAttentionImpl(TorchSDPAImpl):
    """Where the device's kernel would be called."""

    name = "CUSTOM"
