"""Whether the next step is planned while one runs (`--async-scheduling`)."""

from __future__ import annotations

from hardpoint.config.sections import VllmConfig
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import load_ref

# Built-in executors, by what they answer to `supports_async_scheduling`; their modules are not for the front end.
_ABLE = {"uni": True, "mp": True, "ray": True, "external_launcher": False}


def choose_async_scheduling(config: VllmConfig, device_type: str) -> None:
    """Settle `async_scheduling` as far as the front end can: a scheduler class of somebody else's decides itself.

    ConfigError where it was asked for and cannot be.
    """
    # Where the model computes on the processor it has all cores: planning meanwhile takes from it what it saves.
    wanted = device_type != "cpu"
    scheduler = config.scheduler_config
    obstacle = _obstacle(config)
    if scheduler.async_scheduling and obstacle:
        raise ConfigError(
            f"async scheduling cannot be used here: {obstacle}", code="scheduler-async", fix="drop --async-scheduling"
        )
    if scheduler.async_scheduling is None and (obstacle or scheduler.scheduler_cls is None):
        scheduler.async_scheduling = wanted and not obstacle


def _obstacle(config: VllmConfig) -> str:
    parallel = config.parallel_config
    if config.model_config is not None and config.model_config.runner_type == "pooling":
        return "a pooling model makes no tokens to plan with"
    if parallel.pipeline_parallel_size > 1:
        return "with pipeline stages the first one does not know the tokens that the last one samples"
    backend = parallel.distributed_executor_backend
    able = _ABLE.get(backend) if isinstance(backend, str) else None
    if able is None:
        kind = load_ref("hardpoint.contracts.executor:Executor").get_class(config)
        able, backend = kind.supports_async_scheduling(), kind.__qualname__
    return "" if able else f"the executor {backend} does not support it"
