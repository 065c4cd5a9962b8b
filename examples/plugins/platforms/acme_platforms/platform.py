"""The platform: what its device is called, what it can do, how it wants a server configured."""

from typing import Any

from hardpoint.contracts.platform import PlatformEnum
from hardpoint.platforms.cpu import CpuPlatform


class AcmePlatform(CpuPlatform):
    """The host processor, driven as a device of our own. For another device derive from `Platform`."""

    _enum = PlatformEnum.OOT
    device_name = "acme"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Runs in the front end and again in the engine core, so it looks before it writes."""
        if vllm_config.cache_config.block_size is None:
            vllm_config.cache_config.block_size = 32
        super().check_and_update_config(vllm_config)
