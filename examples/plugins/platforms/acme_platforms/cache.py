"""Who plans the KV cache: as usual, with an eighth of the memory kept for the device's own use."""

from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.engine_core.kv_cache.planning import DefaultKVCacheConfigBuilder


class AcmeDeviceCacheBuilder(DefaultKVCacheConfigBuilder):
    """From scratch it derives from `KVCacheConfigBuilder`."""

    def build(self, kv_cache_specs: list[dict[str, KVCacheSpec]], available_memory: list[int]) -> list[KVCacheConfig]:
        """One plan per worker, all with the same number of blocks."""
        return super().build(kv_cache_specs, [size - size // 8 for size in available_memory])
