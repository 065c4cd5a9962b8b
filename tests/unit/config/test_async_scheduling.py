"""When the next step is planned while one runs."""

from __future__ import annotations

import pytest

from hardpoint.config.async_scheduling import choose_async_scheduling
from hardpoint.config.sections import ParallelConfig, SchedulerConfig, VllmConfig
from hardpoint.contracts.executor import Executor
from hardpoint.errors import ConfigError


class Waiting(Executor):
    def _init_executor(self):
        pass

    def collective_rpc(self, *args, **kwargs):
        return []

    def check_health(self):
        pass


class Ahead(Waiting):
    @classmethod
    def supports_async_scheduling(cls):
        return True


def chosen(device="cpu", asked=None, executor="uni", scheduler=None, stages=1):
    config = VllmConfig.__new__(VllmConfig)
    config.__dict__.update(
        parallel_config=ParallelConfig(distributed_executor_backend=executor, pipeline_parallel_size=stages),
        scheduler_config=SchedulerConfig.default_factory(async_scheduling=asked, scheduler_cls=scheduler),
    )
    choose_async_scheduling(config, device)
    return config.scheduler_config.async_scheduling


@pytest.mark.parametrize(("executor", "able"), [("uni", True), ("mp", True), (Ahead, True), (Waiting, False)])
def test_by_default_it_is_on_where_the_cores_are_not_the_models_and_the_executor_can(executor, able):
    assert chosen("cuda", executor=executor) is able
    assert chosen("cpu", executor=executor) is False
    assert chosen("cuda", asked=False, executor=executor) is False


def test_a_scheduler_of_somebody_elses_decides_itself_where_it_can():
    assert chosen("cpu", scheduler="mine.Scheduler") is None
    assert chosen("cuda", scheduler="mine.Scheduler") is None
    assert chosen("cpu", scheduler="mine.Scheduler", executor=Waiting) is False


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"executor": Waiting}, "the executor Waiting does not support it"),
        ({"executor": "mp", "stages": 2}, "with pipeline stages"),
    ],
)
def test_what_cannot_be_is_refused_by_name(more, reason):
    with pytest.raises(ConfigError, match=reason):
        chosen(asked=True, **more)
    assert chosen("cuda", **more) is False
