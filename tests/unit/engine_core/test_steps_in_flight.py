"""Several steps in flight: what is planned before a result is in, and what must not be lost or mixed up meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
from engine_fakes import FakeExecutor, FakeWorker, expected_output, make_config, make_request

from hardpoint.contracts.scheduler import PauseState, SchedulerInterface
from hardpoint.engine_core.scheduler.async_scheduler import AsyncScheduler
from hardpoint.engine_core.scheduler.default import Scheduler
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreOutput
from process_tools import wait_until


class QueueingExecutor(FakeExecutor):
    """Takes calls in order on a thread; every step waits for `gate`."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.events: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._last: threading.Thread | None = None

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        if not non_block:
            return super().collective_rpc(method, timeout, args, kwargs)
        future: Future[Any] = Future()
        self.events.append(f"launch {method}")
        before = self._last

        def work() -> None:
            if before is not None:
                before.join()
            self.gate.wait(60)
            try:
                future.set_result(super(QueueingExecutor, self).collective_rpc(method, timeout, args, kwargs))
            except Exception as error:
                future.set_exception(error)

        self._last = threading.Thread(target=work, daemon=True)
        self._last.start()
        return future


class Splitting(FakeWorker):
    """Samples in a call of its own, as vLLM's worker does."""

    pending: Any = None

    def execute_model(self, plan):
        assert self.pending is None, "a step is sampled before the next is run"
        self.pending = super().execute_model(plan)
        return None if plan.total_num_scheduled_tokens else self.sample_tokens(None)

    def sample_tokens(self, grammar_output):
        pending, self.pending = self.pending, None
        return pending


def make_core(worker: type = FakeWorker, executor: type = QueueingExecutor, **config: Any) -> EngineCore:
    config.setdefault("async_scheduling", True)
    kind = type("Executor", (executor,), {"worker_class": worker})
    return EngineCore(make_config(**config), kind, log_stats=False)


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    steps = 0
    while core.has_work():
        for batch in core.step()[0].values():
            for output in batch.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        steps += 1
        assert steps < 300
    return outputs


def tokens_until_error(core: EngineCore, error: str) -> list[int]:
    """Every token that is given out before `step` raises."""
    found: list[int] = []
    for _ in range(100):
        try:
            outputs, _ = core.step()
        except RuntimeError as raised:
            if str(raised) != error:
                raise
            return found
        found += [token for batch in outputs.values() for token in tokens(batch.outputs)]
    pytest.fail("no step raises")


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("worker", [FakeWorker, Splitting])
def test_requests_get_what_they_get_one_step_at_a_time(worker):
    core = make_core(worker)
    assert isinstance(core.scheduler, AsyncScheduler)
    asked = {name: make_request(name, [ord(name), 2, 3], max_tokens=20) for name in "abc"}
    for request in asked.values():
        core.add_request(request)
    outputs = run(core)
    for name, request in asked.items():
        assert tokens(outputs[name]) == expected_output(request.prompt_token_ids, request.sampling_params, 64)


def test_a_step_is_with_the_workers_before_the_result_of_the_last_is_awaited():
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=5, ignore_eos=True))
    core.model_executor.gate.clear()
    thread = threading.Thread(target=core.step)
    thread.start()
    assert wait_until(lambda: core.model_executor.events.count("launch execute_model") == 2)
    assert thread.is_alive()
    core.model_executor.gate.set()
    thread.join(60)
    assert core.scheduler.requests["a"].num_output_tokens == 1


def test_nothing_is_planned_past_a_token_that_is_sure_to_be_the_last():
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=3, ignore_eos=True))
    run(core)
    assert core.model_executor.worker.runner.steps == 5  # three with a token, one that tells nothing, one of the end


def test_an_id_that_a_step_in_flight_still_has_is_kept_apart():
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=40, ignore_eos=True))
    core.step()
    core.abort_requests(["a"])
    again = make_request("a", [9, 8, 7, 6], max_tokens=6, ignore_eos=True)
    core.add_request(again)
    with pytest.raises(ValueError, match="'a' is in use"):
        core.add_request(again)
    assert tokens(run(core)["a"]) == expected_output([9, 8, 7, 6], again.sampling_params, 64)
    core.add_request(make_request("b", [1, 2, 3], max_tokens=40, ignore_eos=True))
    core.step()
    core.abort_requests(["b"])
    core.add_request(make_request("b", [1]))
    core.abort_requests(["b"])
    assert run(core) == {}


def test_tokens_in_flight_come_before_the_error_of_planning():
    class Failing(AsyncScheduler):
        planned = 0

        def schedule(self, throttle_prefills=False):
            self.planned += 1
            if self.planned == 4:
                raise RuntimeError("no plan today")
            return super().schedule(throttle_prefills)

    core = make_core(scheduler_cls=Failing)
    request = make_request("a", [1, 2, 3], max_tokens=20, ignore_eos=True)
    core.add_request(request)
    found = tokens_until_error(core, "no plan today")
    assert found == expected_output([1, 2, 3], request.sampling_params, 64)[:3]


def test_a_step_that_fails_ends_the_loop_after_the_steps_before_it():
    class Broken(FakeWorker):
        def execute_model(self, plan):
            if self.runner.steps == 2:
                raise RuntimeError("device lost")
            return super().execute_model(plan)

    core = make_core(Broken)
    core.add_request(make_request("a", [1, 2], max_tokens=20, ignore_eos=True))
    assert len(tokens_until_error(core, "device lost")) == 2


def test_a_step_that_never_ends_is_given_up():
    class Limited(QueueingExecutor):
        step_timeout_s = 0.05

    core = make_core(executor=Limited)
    core.add_request(make_request("a", [1, 2]))
    core.model_executor.gate.clear()
    with pytest.raises(TimeoutError, match=r"did not answer in 0\.05 s"):
        core.step()
    core.model_executor.gate.set()


def test_a_pause_lets_steps_in_flight_end_and_nothing_follow():
    core = make_core()
    request = make_request("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    core.add_request(request)
    first = [output for batch in core.step()[0].values() for output in batch.outputs]
    core.pause_scheduler("keep")
    paused = run(core)["a"]
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    assert len(tokens(first + paused)) < 4
    core.resume_scheduler()
    found = tokens([*first, *paused, *run(core)["a"]])
    assert found == expected_output([1, 2, 3], request.sampling_params, 64)


def test_waiting_for_running_requests_includes_their_steps_in_flight():
    core = make_core()
    core.add_request(make_request("a", [1, 2, 3], max_tokens=6, ignore_eos=True))
    core.step()
    drained = core.pause_scheduler("wait")
    outputs = run(core)
    assert drained.done()
    assert outputs["a"][-1].finish_reason is FinishReason.LENGTH
    assert core.scheduler.kv_cache_manager.usage == 0


# Which class schedules.


class Waiting(Scheduler):
    pass


class Ahead(AsyncScheduler):
    pass


def test_a_class_that_can_plan_ahead_does_unless_told_not_to():
    for asked, limit in ((None, 2), (True, 2), (False, 1)):
        core = make_core(scheduler_cls=Ahead, async_scheduling=asked)
        assert core._in_flight.limit == limit
        core.add_request(make_request("a", [1]))
        assert run(core)["a"]
    assert make_core(executor=FakeExecutor, scheduler_cls=Ahead, async_scheduling=None)._in_flight.limit == 1
    assert make_core(scheduler_cls=Waiting, async_scheduling=None)._in_flight.limit == 1


def test_a_class_that_cannot_is_refused_by_name_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(QueueingExecutor, "_init_executor", lambda self: pytest.fail("the model is loaded"))
    scratch = type("Scratch", (SchedulerInterface,), {})
    for kind in (Waiting, scratch):
        with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot schedule asynchronously") as caught:
            make_core(scheduler_cls=kind)
        assert "drop --async-scheduling" in caught.value.fix
    with pytest.raises(ConfigError, match="there is no module 'no_such_package'"):
        make_core(scheduler_cls="no_such_package.Scheduler")
