from __future__ import annotations

import sys
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from engine_fakes import FakeExecutor, make_config

from hardpoint.contracts.executor import Executor
from hardpoint.contracts.worker import WorkerBase
from hardpoint.engine_core.executors import mp, remote
from hardpoint.engine_core.executors.external import ExternalLauncherExecutor
from hardpoint.engine_core.executors.mp import MultiprocExecutor
from hardpoint.engine_core.executors.ray_actors import RayExecutor
from hardpoint.engine_core.executors.uni import UniProcExecutor
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.types.schedule import AsyncModelRunnerOutput, ModelRunnerOutput, SchedulerOutput


def config_with(backend=None, world_size: int = 1, **parallel) -> SimpleNamespace:
    config = make_config()
    config.parallel_config = SimpleNamespace(
        distributed_executor_backend=backend, world_size=world_size, tensor_parallel_size=world_size, nnodes=1,
        worker_cls="auto", worker_extension_cls="", data_parallel_rank=0, **{"pipeline_parallel_size": 1, **parallel},
    )  # fmt: skip
    config.kv_transfer_config = config.compilation_config = None
    return config


# Choice.


@pytest.mark.parametrize(
    ("backend", "world_size", "found"),
    [
        (None, 1, UniProcExecutor),
        (None, 2, MultiprocExecutor),
        ("uni", 1, UniProcExecutor),
        ("mp", 1, MultiprocExecutor),
        ("ray", 2, RayExecutor),
        ("external_launcher", 2, ExternalLauncherExecutor),
        (FakeExecutor, 1, FakeExecutor),
        ("engine_fakes.FakeExecutor", 1, FakeExecutor),
    ],
)
def test_the_backend_names_a_class(backend, world_size, found):
    assert Executor.get_class(config_with(backend, world_size)) is found


@pytest.mark.parametrize("backend", [dict, "collections.OrderedDict", 7])
def test_what_is_no_executor_is_a_type_error(backend):
    with pytest.raises(TypeError, match="must be a subclass of Executor"):
        Executor.get_class(config_with(backend))


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("fast", "'fast' is not a class path"),
        ("no_such_package.Executor", "there is no module 'no_such_package'"),
        ("engine_fakes.Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_a_backend_that_cannot_be_had_is_named(backend, text):
    with pytest.raises(ConfigError, match=text):
        Executor.get_class(config_with(backend))


def test_pipeline_stages_need_an_executor_that_has_them():
    assert Executor.get_class(config_with("mp", 2, pipeline_parallel_size=2)) is MultiprocExecutor
    with pytest.raises(ConfigError, match=r"engine_fakes.FakeExecutor has no pipeline stages"):
        Executor.get_class(config_with(FakeExecutor, 2, pipeline_parallel_size=2))


# In this process.


class Pending(AsyncModelRunnerOutput):
    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(["done"], {"done": 0})


class SmallWorker(WorkerBase):
    def init_device(self):
        self.calls = ["init_device"]

    def load_model(self, *, load_dummy_weights=False):
        self.calls.append("load_model")

    def execute_model(self, scheduler_output):
        return Pending()

    def boom(self):
        raise LookupError("nothing there")

    def where(self):
        return threading.current_thread().name

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def uni():
    config = config_with()
    config.parallel_config.worker_cls = f"{__name__}.SmallWorker"
    return UniProcExecutor(config)


def test_the_worker_is_built_and_loaded(uni):
    worker = uni.driver_worker.worker
    assert type(worker).__name__ == "SmallWorker"
    assert (worker.rank, worker.local_rank, worker.is_driver_worker) == (0, 0, True)
    assert worker.distributed_init_method.startswith("tcp://127.0.0.1:")
    assert worker.calls == ["init_device", "load_model"]
    uni.shutdown()
    assert worker.calls[-1] == "shutdown"


def test_functions_get_the_worker_itself(uni):
    assert uni.collective_rpc(lambda worker: worker is uni.driver_worker.worker) == [True]


def test_only_calls_with_a_limit_take_a_thread(uni):
    here = threading.current_thread().name
    assert uni.collective_rpc("where") == [here]
    assert uni.collective_rpc("where", timeout=60) != [here]


def test_with_async_scheduling_the_worker_takes_calls_in_order_on_a_thread_of_its_own():
    config = config_with()
    config.parallel_config.worker_cls = f"{__name__}.SmallWorker"
    config.scheduler_config.async_scheduling = True
    executor = UniProcExecutor(config)
    assert executor.max_concurrent_batches == 2
    seen: list[str] = []
    gate = threading.Event()
    first = executor.collective_rpc(lambda worker: seen.append(f"first {gate.wait(60)}"), non_block=True)
    second = executor.collective_rpc(lambda worker: seen.append("second"), non_block=True)
    assert not second.done()
    gate.set()
    [here] = executor.collective_rpc("where")
    assert here != threading.current_thread().name
    assert first.done()
    assert seen == ["first True", "second"]
    worker = executor.driver_worker.worker
    executor.shutdown()
    assert worker.calls == ["init_device", "load_model", "shutdown"]


def test_results_that_are_pending_are_waited_for(uni):
    output = uni.execute_model(SchedulerOutput.make_empty())
    assert output.req_ids == ["done"]
    assert uni.execute_model(SchedulerOutput.make_empty(), non_block=True).result().req_ids == ["done"]


def test_futures_hold_errors(uni):
    future = uni.collective_rpc("boom", non_block=True)
    assert isinstance(future, Future)
    with pytest.raises(LookupError, match="nothing there"):
        future.result()
    with pytest.raises(LookupError, match="nothing there"):
        uni.collective_rpc("boom")


# Many workers, without processes.


class FakeLink:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple] = []
        self.answer: Future = Future()
        self.closed = False

    def submit(self, method, args=(), kwargs=None, timeout_s=None, silent=False):
        self.calls.append((method, args, kwargs, timeout_s))
        self.silent = silent
        if method in ("init_device", "load_model"):
            done: Future = Future()
            done.set_result(None)
            return done
        return self.answer

    def close(self):
        self.closed = True


class FakeProcess:
    def __init__(self, start) -> None:
        self.start = start
        self.link = FakeLink(start.rank)
        self.awaited = False
        self.ended = None
        self.child = SimpleNamespace(on_exit=self.watch, wait=self.wait)

    def watch(self, callback):
        self.ended = lambda: callback(SimpleNamespace(name="worker 1", pid=77, status="was killed by SIGKILL"))

    def wait(self, timeout_s):
        self.awaited = True
        return True


@pytest.fixture
def many(monkeypatch):
    monkeypatch.setattr(mp, "to_wire", lambda config: b"config")
    monkeypatch.setattr(mp, "start_workers", lambda starts, timeout_s, first: [FakeProcess(start) for start in starts])
    return MultiprocExecutor(config_with(world_size=3))


def test_every_rank_is_started_and_loaded(many):
    starts = [worker.start for worker in many._workers]
    assert [(start.rank, start.local_rank, start.is_driver_worker) for start in starts] == [
        (0, 0, True),
        (1, 1, False),
        (2, 2, False),
    ]
    assert len({start.distributed_init_method for start in starts}) == 1
    for worker in many._workers:
        assert [call[0] for call in worker.link.calls] == ["init_device", "load_model"]


def test_results_come_in_rank_order(many):
    for worker in reversed(many._workers):
        worker.link.answer.set_result(worker.link.rank)
    assert many.collective_rpc("ranks", timeout=60, args=(1,)) == [0, 1, 2]
    assert many._workers[0].link.calls[-1] == ("ranks", (1,), None, 60)
    assert many.collective_rpc("ranks", non_block=True).result(60) == [0, 1, 2]
    assert many.execute_model(SchedulerOutput.make_empty()) == 0
    # A step's limit is kept here and not sent along; only one rank's result is asked for.
    assert many._workers[0].link.calls[-1][3] is None
    assert [worker.link.silent for worker in many._workers] == [False, True, True]


def test_a_step_in_flight_fails_with_any_rank(many):
    result = many.execute_model(SchedulerOutput.make_empty(), non_block=True)
    many._workers[2].link.answer.set_exception(LookupError("rank 2"))
    with pytest.raises(LookupError, match="rank 2"):
        result.result(60)


def test_the_first_error_comes_at_once_while_others_still_wait(many):
    many._workers[1].link.answer.set_exception(LookupError("rank 1"))
    with pytest.raises(LookupError, match="rank 1"):
        many.collective_rpc("ranks")
    with pytest.raises(LookupError, match="rank 1"):
        many.collective_rpc("ranks", non_block=True).result(60)


def test_silent_workers_are_named_when_time_is_over(many, monkeypatch):
    monkeypatch.setattr(remote, "_ANSWER_GRACE_S", 0.0)
    many._workers[1].link.answer.set_result(None)
    with pytest.raises(TimeoutError, match=r"workers \[0, 2\] did not answer 'ranks' in 0.01 s"):
        many.collective_rpc("ranks", timeout=0.01)
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    with pytest.raises(TimeoutError, match="'execute_model'"):
        many.execute_model(SchedulerOutput.make_empty())


def test_a_worker_that_ends_by_itself_is_reported_once(many):
    reports = []
    many.register_failure_callback(lambda: reports.append(1))
    many._workers[1].ended()
    many._workers[2].ended()
    assert reports == [1]
    for call in (many.check_health, lambda: many.collective_rpc("ranks")):
        with pytest.raises(EngineDeadError, match=r"worker 1 \(pid 77\) was killed by SIGKILL"):
            call()
    late = []
    many.register_failure_callback(lambda: late.append(1))
    assert late == [1]


def test_an_ordered_end_is_no_failure(many):
    reports = []
    many.register_failure_callback(lambda: reports.append(1))
    many.shutdown()
    many._workers[0].ended()
    assert reports == []
    assert all(worker.link.closed and worker.awaited for worker in many._workers)
    many.shutdown()


def test_more_than_one_machine_is_refused(monkeypatch):
    config = config_with(world_size=2)
    config.parallel_config.nnodes = 2
    with pytest.raises(ConfigError, match="nnodes=2"):
        MultiprocExecutor(config)


def test_ranks_of_a_launcher_must_be_given_and_match(monkeypatch):
    config = config_with(world_size=2, pipeline_parallel_size=1)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="needs RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        ExternalLauncherExecutor(config)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="started 3 ranks, the configuration has 2"):
        ExternalLauncherExecutor(config)


def test_ray_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'hardpoint\[ray\]'"):
        RayExecutor(config_with(world_size=2))
