"""The steps that workers have and the engine core has no result of yet, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hardpoint.contracts.executor import Executor
from hardpoint.types.schedule import AsyncModelRunnerOutput, GrammarOutput, ModelRunnerOutput, SchedulerOutput

GrammarOf = Callable[[SchedulerOutput], GrammarOutput | None]


class Step:
    """One step in flight.

    executed  what `execute_model` returns
    sampled   what `sample_tokens` returns; None while the grammar's rows wait for the tokens of earlier steps
    """

    __slots__ = ("executed", "plan", "sampled")

    def __init__(self, plan: SchedulerOutput, executed: Any) -> None:
        self.plan = plan
        self.executed = executed
        self.sampled: Any = None

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Wait for the step's result; raises what the worker raised, and TimeoutError past `timeout_s`."""
        result = _settled(self.executed, timeout_s)
        if result is None:
            result = _settled(self.sampled, timeout_s)
        assert isinstance(result, ModelRunnerOutput), f"the executor returned {type(result).__name__}"
        return result


class StepsInFlight:
    """Hands steps to the workers without waiting for them. The workers take the steps, and all calls, in order.

    limit  steps at once; with 1 every step is waited for before the next is planned
    """

    def __init__(self, executor: Executor, grammar_of: GrammarOf, limit: int) -> None:
        self.limit = limit
        self._executor = executor
        self._grammar_of = grammar_of
        self._steps: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether another step can be launched now: the last one must not wait for its grammar's rows."""
        return len(self._steps) < self.limit and not (self._steps and self._steps[-1].sampled is None)

    @property
    def has_tokens(self) -> bool:
        """Whether a step in flight computes something."""
        return any(step.plan.total_num_scheduled_tokens for step in self._steps)

    def computes(self, request_id: str) -> bool:
        """Whether a step in flight has tokens of a request with this id."""
        return any(request_id in step.plan.num_scheduled_tokens for step in self._steps)

    def launch(self, plan: SchedulerOutput) -> None:
        """Hand a step to the workers.

        Sampling follows at once, except where the rows of a grammar depend on tokens still to come.
        """
        step = Step(plan, self._executor.execute_model(plan, non_block=True))
        must_wait = plan.has_structured_output_requests and any(
            not plan.num_scheduled_tokens.keys().isdisjoint(earlier.plan.num_scheduled_tokens)
            for earlier in self._steps
        )
        self._steps.append(step)
        if not must_wait:
            self._sample(step)

    def oldest(self) -> Step:
        """The step whose result comes next."""
        return self._steps[0]

    def drop_oldest(self) -> None:
        """Forget the oldest step, whose result has been taken in; the next may be sampled now."""
        self._steps.popleft()
        if self._steps and self._steps[0].sampled is None:
            self._sample(self._steps[0])

    def _sample(self, step: Step) -> None:
        if not step.plan.total_num_scheduled_tokens:
            step.sampled = step.executed
            return
        # A worker that has sampled already has nothing left to do here.
        step.sampled = self._executor.sample_tokens(self._grammar_of(step.plan), non_block=True)


def _settled(result: Any, timeout_s: float | None) -> Any:
    """What a future or an output that is still on the device comes to."""
    if isinstance(result, Future):
        try:
            result = result.result(timeout_s)
        except TimeoutError:
            if result.done():
                raise
            raise TimeoutError(f"the workers did not answer in {timeout_s:g} s") from None
    return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result
