"""How many blocks there are, and where they lie: from the workers' layers and their free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.contracts.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheConfigBuilder,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    spec_of_layer,
)
from hardpoint.errors import ConfigError, PluginError
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname
from hardpoint.log import init_logger

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

# Not imported: an import would choose the platform before the process has booted.
_PLATFORM = "hardpoint.platforms:current_platform"
logger = init_logger(__name__)

LayerSpecs = dict[str, KVCacheSpec]
Groups = list[KVCacheGroupSpec]
# The null block, which no request gets.
_SPARE_BLOCKS = 1
# Groups of layers beyond which shorter ones are rather padded.
_MOST_GROUPS = 8


class DefaultKVCacheConfigBuilder(KVCacheConfigBuilder):
    """One group over all layers, and one tensor per layer.

    Where windowed and full layers are mixed, each kind has groups of its own, whose layers share memory block by
    block, so that windowed layers keep their window only. Where that cannot be (see `groups_of_kinds`), or is not
    wanted (`disable_hybrid_kv_cache_manager`), windowed layers are stored like full ones.
    """

    def build(self, kv_cache_specs: list[LayerSpecs], available_memory: list[int]) -> list[KVCacheConfig]:
        """Plan by the worker with the fewest blocks; see the contract."""
        groups = plan_groups(self.vllm_config, kv_cache_specs)
        if not groups:
            return [KVCacheConfig(num_blocks=_SPARE_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[])] * len(
                kv_cache_specs
            )
        num_blocks = self._num_blocks(groups, kv_cache_specs, available_memory)
        return [_plan_of_worker(groups, specs, num_blocks) for specs in kv_cache_specs]

    def _num_blocks(self, groups: Groups, kv_cache_specs: list[LayerSpecs], available_memory: list[int]) -> int:
        fitting = blocks_that_fit(groups, kv_cache_specs, available_memory)
        override = self.vllm_config.cache_config.num_gpu_blocks_override
        if override is None:
            check_one_request_fits(self.vllm_config, groups, fitting, kv_cache_specs, available_memory)
            return fitting
        logger.info("num_gpu_blocks_override: %d blocks instead of the %d that memory holds", override, fitting)
        if override > fitting:
            logger.warning("num_gpu_blocks_override=%d needs more memory than was found free", override)
        needed = _blocks_per_request(self.vllm_config, groups, _max_model_len(self.vllm_config)) + _SPARE_BLOCKS
        if override < needed:
            logger.warning(
                "num_gpu_blocks_override=%d is below the %d blocks of one request of max_model_len=%d tokens: "
                "longer requests are refused or end early with finish_reason length",
                override,
                needed,
                _max_model_len(self.vllm_config),
            )
        return override


def load_builder(vllm_config: VllmConfig) -> KVCacheConfigBuilder:
    """The platform's builder (`get_kv_cache_config_builder_cls`), ours where it names none."""
    platform = load_ref(_PLATFORM)
    name = platform.get_kv_cache_config_builder_cls()
    if not name:
        return DefaultKVCacheConfigBuilder(vllm_config)
    builder_cls = resolve_obj_by_qualname(name)
    if not (isinstance(builder_cls, type) and issubclass(builder_cls, KVCacheConfigBuilder)):
        raise PluginError(
            f"{name} is not a KVCacheConfigBuilder",
            code="kv-cache-builder",
            origin=f"platform {type(platform).__name__}, get_kv_cache_config_builder_cls",
            fix="derive it from KVCacheConfigBuilder",
        )
    return builder_cls(vllm_config)


def check_plans(plans: Sequence[KVCacheConfig], num_workers: int) -> None:
    """Hold a builder's answer against its contract; PluginError when it breaks it."""
    if len(plans) != num_workers or len({plan.num_blocks for plan in plans}) > 1 or plans[0].num_blocks < 1:
        raise PluginError(
            f"the KV cache builder returned {len(plans)} plans for {num_workers} workers, with block counts "
            f"{sorted({plan.num_blocks for plan in plans})}",
            code="kv-cache-builder",
            fix="return one plan per worker, all with the same positive num_blocks",
        )


def plan_groups(vllm_config: VllmConfig, kv_cache_specs: list[LayerSpecs]) -> Groups:
    """The groups of layers that share a block table; none when no layer stores anything."""
    layers = stored_layers(kv_cache_specs)
    if not layers:
        return []
    if UniformTypeKVCacheSpecs.is_uniform_type(layers):
        return [group_of(layers)]
    # A worker without layers of one kind could not follow the groups.
    alike = all(specs.keys() == kv_cache_specs[0].keys() for specs in kv_cache_specs)
    if alike and not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        groups = groups_of_kinds(layers)
        if groups:
            return groups
    return [group_of({name: _as_full(spec) for name, spec in layers.items()})]


def groups_of_kinds(layers: LayerSpecs) -> Groups:
    """Groups of layers with equal specs, as long as each other as far as that goes; none where that cannot be.

    Layers of different groups use the same memory, each in blocks of its own, so all blocks must have one size. The
    more groups, the less is wasted on shorter ones, and the more there is to do in every step.
    """
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        kinds.setdefault(spec, []).append(name)
    sizes = {(spec.page_size_bytes, spec.block_size) for spec in kinds}
    if len(sizes) > 1 or not all(isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)) for spec in kinds):
        return []
    counts = [len(names) for names in kinds.values()]
    for length in range(min(counts), max(counts) + 1):
        if sum(_ceil_div(count, length) for count in counts) <= max(_MOST_GROUPS, len(kinds)):
            break
    groups = []
    for spec, names in kinds.items():
        number = _ceil_div(len(names), length)
        groups += [KVCacheGroupSpec(layer_names=names[i::number], kv_cache_spec=spec) for i in range(number)]
    return groups


def _ceil_div(amount: int, unit: int) -> int:
    return -(-amount // unit)


def stored_layers(kv_cache_specs: list[LayerSpecs]) -> LayerSpecs:
    """All layers that store something, over all workers."""
    layers: LayerSpecs = {}
    for specs in kv_cache_specs:
        for name, spec in specs.items():
            if layers.setdefault(name, spec) != spec:
                raise ConfigError(f"workers disagree about the KV cache of layer {name}", code="kv-cache-spec")
    return {name: spec for name, spec in layers.items() if spec.page_size_bytes and not _stores_nothing(spec)}


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    return spec.as_full_attention() if isinstance(spec, SlidingWindowSpec) else spec


def _stores_nothing(spec: KVCacheSpec) -> bool:
    return spec.kind.value == "encoder_only_attention"


def group_of(layers: LayerSpecs) -> KVCacheGroupSpec:
    """One group over `layers`; ConfigError when they cannot share a block table."""
    first = next(iter(layers.values()))
    if all(spec == first for spec in layers.values()):
        return KVCacheGroupSpec(layer_names=list(layers), kv_cache_spec=first)
    uniform = UniformTypeKVCacheSpecs.from_specs(layers)
    if uniform is None:
        kinds = sorted({f"{type(spec).__name__} of {spec.block_size} tokens" for spec in layers.values()})
        raise ConfigError(
            f"layers that store {' and '.join(kinds)} cannot be mixed in one model yet",
            code="kv-cache-spec",
            fix="use a platform whose get_kv_cache_config_builder_cls plans such models",
        )
    return KVCacheGroupSpec(layer_names=list(layers), kv_cache_spec=uniform)


def blocks_that_fit(groups: Groups, kv_cache_specs: list[LayerSpecs], available_memory: list[int]) -> int:
    """Blocks that every worker has memory for."""
    pages = (_page_bytes(groups, specs) for specs in kv_cache_specs)
    return min(max(0, free) // page for page, free in zip(pages, available_memory, strict=True) if page)


def _page_bytes(groups: Groups, specs: LayerSpecs) -> int:
    """Bytes of one block over the layers of one worker: those of the longest group, as the others share its memory."""
    return max(
        sum(spec_of_layer(group, name).page_size_bytes for name in group.layer_names if name in specs)
        for group in groups
    )


def _plan_of_worker(groups: Groups, specs: LayerSpecs, num_blocks: int) -> KVCacheConfig:
    own = [
        KVCacheGroupSpec(
            layer_names=[name for name in group.layer_names if name in specs], kv_cache_spec=group.kv_cache_spec
        )
        for group in groups
    ]
    block_size = groups[0].kv_cache_spec.block_size
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[_tensor(own, place, num_blocks) for place in range(max(len(g.layer_names) for g in own))],
        kv_cache_groups=own,
        hash_block_size=block_size,
        cache_hit_alignment_tokens=block_size,
    )


def _tensor(groups: Groups, place: int, num_blocks: int) -> KVCacheTensor:
    """The memory of the layers that stand at one place in their groups."""
    at_place = [(group, group.layer_names[place]) for group in groups if place < len(group.layer_names)]
    page = spec_of_layer(*at_place[0]).page_size_bytes
    names = [name for _, name in at_place]
    return KVCacheTensor(size=num_blocks * page, layers=names, layer_stride=0, block_stride=page)


def check_one_request_fits(
    vllm_config: VllmConfig,
    groups: Groups,
    num_blocks: int,
    kv_cache_specs: list[LayerSpecs],
    available_memory: list[int],
) -> None:
    """ConfigError, with what to change, unless one request of `max_model_len` tokens fits."""
    max_model_len = _max_model_len(vllm_config)
    needed = _blocks_per_request(vllm_config, groups, max_model_len) + _SPARE_BLOCKS
    if needed <= num_blocks:
        return
    page = max(_page_bytes(groups, specs) for specs in kv_cache_specs)
    fits = longest_fitting(vllm_config, groups, num_blocks)
    shorter = f", or lower --max-model-len to {fits} or less (auto picks what fits)" if fits else ""
    raise ConfigError(
        f"one request of max_model_len={max_model_len} tokens needs {_size(needed * page)} of KV cache, "
        f"but {_size(max(0, min(available_memory)))} are available",
        code="kv-cache-memory",
        fix="raise --kv-cache-memory-bytes (on a CPU also VLLM_CPU_KVCACHE_SPACE) or --gpu-memory-utilization"
        + shorter,
    )


def fit_max_model_len(vllm_config: VllmConfig, kv_cache_specs: list[LayerSpecs], available_memory: list[int]) -> int:
    """The longest context, at most the configured one, of which one request fits into memory.

    ConfigError when not even one block's tokens do.
    """
    groups = plan_groups(vllm_config, kv_cache_specs)
    if not groups:
        return _max_model_len(vllm_config)
    override = vllm_config.cache_config.num_gpu_blocks_override
    num_blocks = override or blocks_that_fit(groups, kv_cache_specs, available_memory)
    fits = longest_fitting(vllm_config, groups, num_blocks)
    if fits == 0:
        check_one_request_fits(vllm_config, groups, num_blocks, kv_cache_specs, available_memory)
    return fits


def longest_fitting(vllm_config: VllmConfig, groups: Groups, num_blocks: int) -> int:
    """Tokens of the longest request that `num_blocks` can hold, at most `max_model_len`."""

    def fits(num_tokens: int) -> bool:
        return _blocks_per_request(vllm_config, groups, num_tokens) + _SPARE_BLOCKS <= num_blocks

    low, high = 0, _max_model_len(vllm_config)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _blocks_per_request(vllm_config: VllmConfig, groups: Groups, num_tokens: int) -> int:
    return sum(group.kv_cache_spec.max_num_blocks_per_req(vllm_config, num_tokens) for group in groups)


def _max_model_len(vllm_config: VllmConfig) -> int:
    length = vllm_config.model_config.max_model_len
    assert length is not None
    return length


def describe_plan(vllm_config: VllmConfig, plan: KVCacheConfig) -> tuple[int, float]:
    """(tokens the cache holds, requests of `max_model_len` that fit at once)."""
    if not plan.kv_cache_groups:
        return 0, 0.0
    usable = plan.num_blocks - _SPARE_BLOCKS
    blocks = _blocks_per_request(vllm_config, plan.kv_cache_groups, _max_model_len(vllm_config))
    concurrency = usable / blocks if blocks else 0.0
    return usable * plan.kv_cache_groups[0].kv_cache_spec.block_size // len(plan.kv_cache_groups), concurrency


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"
