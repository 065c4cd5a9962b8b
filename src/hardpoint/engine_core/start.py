"""Between loading the model and the first step: the KV cache plan and the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hardpoint.contracts.executor import Executor
from hardpoint.contracts.kv_cache import KVCacheConfig
from hardpoint.contracts.scheduler import SchedulerInterface
from hardpoint.engine_core.kv_cache.planning import (
    LayerSpecs,
    check_plans,
    describe_plan,
    fit_max_model_len,
    load_builder,
)
from hardpoint.errors import ConfigError, PluginError, reason_of
from hardpoint.extensions.refs import load_ref, ref_of
from hardpoint.log import init_logger

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

# Not imported: an import would choose the platform before the process has booted.
_PLATFORM = "hardpoint.platforms:current_platform"
logger = init_logger(__name__)


def plan_kv_cache(vllm_config: VllmConfig, executor: Executor) -> KVCacheConfig:
    """Plan the KV cache from what the workers report, have them allocate it, and note the result in the config.

    ConfigError when memory does not suffice for one request.
    """
    load_ref(_PLATFORM).register_custom_kv_cache_specs(vllm_config)
    specs = executor.get_kv_cache_specs()
    available = executor.determine_available_memory() if any(specs) else [0] * len(specs)
    if is_length_open(vllm_config):
        _choose_max_model_len(vllm_config, executor, specs, available)
    plans = load_builder(vllm_config).build(specs, available)
    check_plans(plans, len(specs))
    executor.initialize_from_config(plans)
    _note_plan(vllm_config, plans[0])
    return plans[0]


def is_length_open(vllm_config: VllmConfig) -> bool:
    """Whether `--max-model-len auto` leaves the length to memory."""
    return vllm_config.model_config.original_max_model_len == -1


def _choose_max_model_len(
    vllm_config: VllmConfig, executor: Executor, specs: list[LayerSpecs], available: list[int]
) -> None:
    fits = fit_max_model_len(vllm_config, specs, available)
    logger.info("max_model_len: %d tokens fit, of %s", fits, vllm_config.model_config.max_model_len)
    if fits != vllm_config.model_config.max_model_len:
        vllm_config.model_config.max_model_len = fits
        executor.update_max_model_len(fits)


def _note_plan(vllm_config: VllmConfig, plan: KVCacheConfig) -> None:
    cache = vllm_config.cache_config
    tokens, concurrency = describe_plan(vllm_config, plan)
    cache.num_gpu_blocks = plan.num_blocks
    cache.kv_cache_size_tokens = tokens
    cache.kv_cache_max_concurrency = concurrency
    if not plan.kv_cache_groups:
        return
    block_size = plan.kv_cache_groups[0].kv_cache_spec.block_size
    cache.block_size = block_size
    cache.hash_block_size = cache.cache_hit_alignment_tokens = block_size
    size_gib = sum(tensor.size for tensor in plan.kv_cache_tensors) / 2**30
    logger.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB per worker), %d tokens in all, %.1f requests of %s tokens at once",
        plan.num_blocks,
        block_size,
        size_gib,
        tokens,
        concurrency,
        vllm_config.model_config.max_model_len,
    )


def choose_scheduler(vllm_config: VllmConfig, executor_class: type[Executor]) -> type[SchedulerInterface]:
    """The scheduler class the config names; also settles whether a step is planned while another runs.

    ConfigError or PluginError for a class that cannot be used, or not with what else was asked for.
    """
    config = vllm_config.scheduler_config
    found = _scheduler_class(vllm_config)
    if config.async_scheduling is None:
        # The front end leaves it open with a class of somebody else's: one that can plan ahead is there to do so.
        config.async_scheduling = found.supports_async_scheduling() and executor_class.supports_async_scheduling()
    elif config.async_scheduling and not found.supports_async_scheduling():
        raise ConfigError(
            f"{_name_of(found)} cannot schedule asynchronously: supports_async_scheduling() is False",
            code="scheduler-async",
            origin="scheduler_config.scheduler_cls",
            fix="derive it from vllm.v1.core.sched.async_scheduler.AsyncScheduler, or drop --async-scheduling",
        )
    return found


def make_scheduler(
    scheduler_cls: type[SchedulerInterface],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    structured_output_manager: Any = None,
    *,
    include_finished_set: bool,
    log_stats: bool,
) -> SchedulerInterface:
    """Build the scheduler; what its constructor raises stops the start."""
    groups = kv_cache_config.kv_cache_groups
    block_size = groups[0].kv_cache_spec.block_size if groups else vllm_config.cache_config.block_size or 1
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=structured_output_manager,
        include_finished_set=include_finished_set,
        log_stats=log_stats,
        block_size=block_size,
        hash_block_size=block_size,
    )


def _scheduler_class(vllm_config: VllmConfig) -> type[SchedulerInterface]:
    chosen = vllm_config.scheduler_config.scheduler_cls
    try:
        found = vllm_config.scheduler_config.get_scheduler_cls()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"scheduler_cls={chosen!r} cannot be loaded: {reason_of(error)}",
            code="scheduler-class",
            origin="scheduler_config.scheduler_cls",
            fix="give the dotted path of a class, such as my_package.scheduling.MyScheduler (--scheduler-cls)",
        ) from error
    if not (isinstance(found, type) and issubclass(found, SchedulerInterface)):
        raise PluginError(
            f"scheduler_cls={chosen!r} is not a SchedulerInterface",
            code="scheduler-class",
            origin="scheduler_config.scheduler_cls",
            fix="derive it from Scheduler or SchedulerInterface",
        )
    if not found.__module__.startswith("hardpoint."):
        logger.warning(
            "the scheduler is %s: its interface is not public and may change between versions", _name_of(found)
        )
    return found


def _name_of(kind: type) -> str:
    try:
        return ref_of(kind)
    except ConfigError:
        return kind.__qualname__
