"""Custom processors of both interfaces inside a real runner: state follows its request, faults stay with theirs."""

import numpy as np
import pytest
import torch
from worker_fakes import Driver, Job, greedy, make_runner

from hardpoint.contracts.logits_processor import (
    AdapterLogitsProcessor,
    LogitsProcessorV1,
    LogitsProcessorV2,
    MoveDirectionality,
    process_dict_updates,
)
from hardpoint.errors import PluginError
from hardpoint.extensions.ledger import ledger
from hardpoint.types.sampling_params import SamplingParams

FORBIDDEN = float("-inf")
ALIVE: list = []


def wish_of(params):
    """(place from 1, token) that a request asks to be forced, or None."""
    extra = params.extra_args or {}
    return (extra["force_at"], extra["tok"]) if "force_at" in extra else None


def force(row, token):
    kept = row[token].clone()
    row[:] = FORBIDDEN
    row[token] = kept


class ByOutput(LogitsProcessorV1):
    """V1: reads the place from the live output list."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = {}
        ALIVE.append(self)

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        def new(params, prompt, output):
            return (wish_of(params), output) if wish_of(params) else None

        process_dict_updates(self.rows, batch_update, new)

    def apply(self, logits):
        for row, ((place, token), output) in self.rows.items():
            if len(output) == place - 1:
                force(logits[row], token)
        return logits

    @property
    def state(self):
        return self.rows


class ByList(ByOutput):
    """V1: holds a list of rows and moves its entries itself, as published plugins do."""

    def __init__(self, *args):
        super().__init__(*args)
        self.entries = []

    def update_state(self, batch_update):
        if not batch_update:
            return
        for row in batch_update.removed:
            self.entries[row] = None
        for row, params, _, output in batch_update.added:
            if row < len(self.entries):
                self.entries[row] = (wish_of(params), output)
            else:
                self.entries.append((wish_of(params), output))
        for source, target, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.entries[target], self.entries[source] = self.entries[source], None
        self.entries = [entry for entry in self.entries if entry is not None]

    def apply(self, logits):
        assert len(self.entries) == len(logits)
        for row, (wish, output) in enumerate(self.entries):
            if wish and len(output) == wish[0] - 1:
                force(logits[row], wish[1])
        return logits

    @property
    def state(self):
        return self.entries


class Counting(AdapterLogitsProcessor):
    """V1 by requests: counts its own calls instead of looking at the output."""

    def __init__(self, *args):
        super().__init__(*args)
        ALIVE.append(self)

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        wish = wish_of(params)
        if wish is None:
            return None
        calls = 0

        def change(output_ids, logits):
            nonlocal calls
            calls += 1
            if calls == wish[0]:
                force(logits, wish[1])
            return logits

        return change

    @property
    def state(self):
        return self.req_info


class BySlot(LogitsProcessorV2):
    """V2: reads the place from the worker's request state."""

    def __init__(self, vllm_config, req_states):
        self.states = req_states
        self.wishes = {}
        ALIVE.append(self)

    def add_request(self, req_idx, sampling_params):
        self.wishes.pop(req_idx, None)
        wish = wish_of(sampling_params)
        if wish:
            self.wishes[req_idx] = wish
        return wish is not None

    def remove_request(self, req_idx):
        self.wishes.pop(req_idx, None)

    def apply(self, logits, ctx):
        lengths = self.states.total_len.gpu - self.states.prompt_len.gpu
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            wish = self.wishes.get(slot)
            if wish and lengths[slot] == wish[0] - 1:
                force(logits[row], wish[1])
        return logits

    @property
    def state(self):
        return self.wishes


class CountingBySlot(BySlot):
    """V2: counts its own calls per slot."""

    def add_request(self, req_idx, sampling_params):
        used = super().add_request(req_idx, sampling_params)
        if used:
            self.wishes[req_idx] = [0, *self.wishes[req_idx]]
        return used

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            wish = self.wishes.get(slot)
            if wish:
                wish[0] += 1
                if wish[0] == wish[1]:
                    force(logits[row], wish[2])
        return logits


KINDS = [ByOutput, ByList, Counting, BySlot, CountingBySlot]


def work(**special):
    jobs = [
        Job(f"job{i}", [(i * 11 + k) % 80 for k in range(1 + 4 * i)], greedy(max_tokens=4 + 2 * i)) for i in range(8)
    ]
    jobs[4].params.extra_args = {"force_at": 5, "tok": 33}
    jobs[6].params.allowed_token_ids = list(range(10, 20))
    jobs[7].params.allowed_token_ids = list(range(40, 50))
    for index, params in special.items():
        jobs[int(index[1:])].params.extra_args = params
    return jobs


def outputs(jobs):
    return {job.req_id: (job.output, job.error) for job in jobs}


@pytest.fixture(scope="module")
def solo():
    with pytest.MonkeyPatch.context() as patch:
        runner = make_runner(patch, logits_processors=[ByOutput])
        return outputs([Driver(runner, chunk=1000, unrest=0).run(job)[0] for job in work()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_forced_token_comes_once_at_its_place_in_its_request(monkeypatch, kind, seed, solo):
    ALIVE.clear()
    runner = make_runner(monkeypatch, logits_processors=[kind], max_num_seqs=[8, 3][seed % 2])
    jobs = Driver(runner, seed, slots=[8, 3][seed % 2], chunk=4, unrest=0.25).run(*work())
    assert outputs(jobs) == solo
    assert jobs[4].output[4] == 33
    assert not any(processor.state for processor in ALIVE)


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_neighbours_take_no_state_with_them(monkeypatch, kind, solo):
    runner = make_runner(monkeypatch, logits_processors=[kind])
    jobs = work()
    jobs[2].cancel_after, jobs[5].cancel_after = 1, 3
    Driver(runner, 5).run(*jobs)
    for req_id, answer in outputs(jobs).items():
        if req_id not in ("job2", "job5"):
            assert answer == solo[req_id]


def test_both_interfaces_work_side_by_side(monkeypatch):
    runner = make_runner(monkeypatch, logits_processors=[ByOutput, AddOne, BySlot])
    jobs = Driver(runner, 1).run(*work())
    assert jobs[4].output[4] == 33
    # AddOne comes between the two and has its say everywhere.
    assert all(job.output == Driver(runner, 9).run(again)[0].output for job, again in zip(jobs, work(), strict=True))


class AddOne(LogitsProcessorV1):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits + 1.0


class Sharpen(AddOne):
    """Keeps the best token: only random batches are to pass here."""

    calls: list = []

    def is_argmax_invariant(self):
        return True

    def apply(self, logits):
        self.calls.append(logits.clone())
        best = logits.argmax(-1)
        logits[:] = FORBIDDEN
        logits[torch.arange(len(best)), best] = 0.0
        return logits


def test_argmax_invariant_processors_are_left_out_of_greedy_batches(monkeypatch):
    Sharpen.calls.clear()
    runner = make_runner(monkeypatch, logits_processors=[Sharpen])
    Driver(runner).run(Job("a", [1, 2], greedy(max_tokens=3)))
    assert not Sharpen.calls
    (greedy_job,) = Driver(runner).run(Job("b", [1, 2], greedy(max_tokens=3)))
    (random_job,) = Driver(runner).run(Job("c", [1, 2], SamplingParams(temperature=5.0, max_tokens=3)))
    assert len(Sharpen.calls) == 3
    assert random_job.output == greedy_job.output


class Fails(BySlot):
    """V2: raises where and how a request asks."""

    def add_request(self, req_idx, sampling_params):
        super().add_request(req_idx, sampling_params)
        self.wishes[req_idx] = (sampling_params.extra_args or {}).get("fail")
        if self.wishes[req_idx] == "add":
            raise RuntimeError("no")
        return {None: False, "none": None}.get(self.wishes[req_idx], True)

    def apply_staged_writes(self):
        if "write" in self.wishes.values():
            raise RuntimeError("cannot write")

    def apply(self, logits, ctx):
        wishes = [self.wishes.get(slot) for slot in ctx.idx_mapping_np.tolist()]
        if "apply" in wishes:
            logits[:] = 0.0
            raise RuntimeError("broken")
        if "shape" in wishes:
            return logits[:, :3]
        return None if "forgets" in wishes else logits


class FailsByRow(LogitsProcessorV1):
    """V1: raises where and how a request asks."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        def new(params, prompt, output):
            wish = (params.extra_args or {}).get("fail")
            if wish == "add":
                raise RuntimeError("no")
            return (wish, output)

        process_dict_updates(self.rows, batch_update, new)

    def apply(self, logits):
        assert len(logits) == len(self.rows)
        if any(wish == "apply" and len(output) >= 1 for wish, output in self.rows.values()):
            logits[:] = 0.0
            raise RuntimeError("broken")
        return logits


@pytest.mark.parametrize("kind", [Fails, FailsByRow])
@pytest.mark.parametrize("how", ["add", "apply"])
@pytest.mark.parametrize("seed", range(3))
def test_a_raising_processor_ends_the_requests_that_use_it(monkeypatch, kind, how, seed, solo):
    runner = make_runner(monkeypatch, logits_processors=[ByOutput, kind])
    jobs = Driver(runner, seed).run(*work(j3={"fail": how}))
    assert "RuntimeError" in jobs[3].error
    assert kind.__qualname__ in jobs[3].error
    expected = {req_id: answer for req_id, answer in solo.items() if req_id != "job3"}
    found = {req_id: answer for req_id, answer in outputs(jobs).items() if req_id != "job3"}
    if kind is FailsByRow and how == "apply":
        # A V1 processor does not say who uses it: requests with arguments are taken to.
        expected.pop("job4"), found.pop("job4")
    assert found == expected
    # The worker goes on, with the processor at work.
    (late,) = Driver(runner).run(Job("late", [3], greedy(max_tokens=3)))
    assert late.error is None


@pytest.mark.parametrize("how", ["write", "shape", "forgets"])
def test_other_ways_to_fail_end_only_their_users_too(monkeypatch, how, solo):
    before = len(ledger.entries(kind="fault", key="logits_processors"))
    runner = make_runner(monkeypatch, logits_processors=[ByOutput, Fails])
    jobs = Driver(runner, 2).run(*work(j3={"fail": how}))
    assert jobs[3].error is not None
    assert {r: a for r, a in outputs(jobs).items() if r != "job3"} == {r: a for r, a in solo.items() if r != "job3"}
    faults = ledger.entries(kind="fault", key="logits_processors")[before:]
    assert [(entry.name, "failed in apply" in entry.detail) for entry in faults] == [("Fails", True)]


def test_a_forgotten_return_value_counts_as_true(monkeypatch):
    calls = []
    monkeypatch.setattr(Fails, "apply", lambda self, logits, ctx: calls.append(1) or logits)
    runner = make_runner(monkeypatch, logits_processors=[Fails])
    Driver(runner).run(Job("a", [1], greedy(max_tokens=2, extra_args={"fail": "none"})))
    assert calls


def test_an_adapter_blames_only_the_row_whose_callable_raised(monkeypatch, solo):
    class Picky(Counting):
        def new_req_logits_processor(self, params):
            if (params.extra_args or {}).get("fail"):
                return lambda prompt_ids, output_ids, logits: 1 / 0
            return super().new_req_logits_processor(params)

    runner = make_runner(monkeypatch, logits_processors=[Picky])
    # Chunks of whole prompts, so that the count of job4 is not disturbed by a second try in one step.
    jobs = work(j3={"fail": True})
    Driver(runner, chunk=1000, unrest=0, slots=1).run(*jobs)
    assert "ZeroDivisionError" in jobs[3].error
    assert {r: a for r, a in outputs(jobs).items() if r != "job3"} == {r: a for r, a in solo.items() if r != "job3"}


def test_a_slot_processor_nobody_uses_is_not_called(monkeypatch):
    def never(self, logits, ctx):
        raise AssertionError("called for nobody")

    monkeypatch.setattr(BySlot, "apply", never)
    (job,) = Driver(make_runner(monkeypatch, logits_processors=[BySlot])).run(Job("a", [1], greedy(max_tokens=2)))
    assert job.error is None


def test_the_context_describes_each_row(monkeypatch):
    seen = []

    class Looks(LogitsProcessorV2):
        def __init__(self, vllm_config, req_states):
            self.states = req_states

        def apply(self, logits, ctx):
            for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
                length = int(ctx.seq_lens_upper_bound_np[row])
                tokens = self.states.all_token_ids.gpu[slot, :length].tolist()
                assert ctx.pos[row] == length - 1
                assert ctx.input_ids[row] == tokens[-1]
                assert self.states.total_len.gpu[slot] == length
                seen.append(tokens)
            assert len(ctx.expanded_idx_mapping) == len(logits)
            return logits

    runner = make_runner(monkeypatch, logits_processors=[Looks])
    jobs = Driver(runner, 3).run(*work())
    assert all(job.error is None for job in jobs)
    for job in jobs:
        for place in range(len(job.output)):
            assert job.prompt + job.output[:place] in seen


class Unbuildable(BySlot):
    def __init__(self, vllm_config, req_states):
        raise OSError("no licence")


def test_a_processor_that_cannot_be_built_stops_the_start(monkeypatch):
    with pytest.raises(PluginError, match=r"Unbuildable.*OSError: no licence"):
        make_runner(monkeypatch, logits_processors=[Unbuildable])


def test_warm_up_is_not_shown_to_processors(monkeypatch):
    ALIVE.clear()
    runner = make_runner(monkeypatch, logits_processors=[BySlot, ByList])
    monkeypatch.setattr(BySlot, "add_request", lambda *a: pytest.fail("shown"))
    monkeypatch.setattr(ByList, "update_state", lambda *a: pytest.fail("shown"))
    runner.warm_up()


def test_masks_of_neighbours_stay_apart_when_rows_move(monkeypatch):
    runner = make_runner(monkeypatch, logits_processors=[ByList])
    jobs = work()
    Driver(runner, 8, slots=3).run(*jobs)
    assert set(jobs[6].output) <= set(range(10, 20))
    assert set(jobs[7].output) <= set(range(40, 50))
    assert not np.intersect1d(jobs[6].output, jobs[7].output).size
