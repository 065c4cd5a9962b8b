import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.contracts.logits_processor import MoveDirectionality, process_dict_updates
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.worker.batch import BlockTable, DenseRows, RequestState, RequestTable

SLOTS, MAX_LEN, BLOCK = 4, 40, 4


def new_data(req_id, prompt, blocks=((),), computed=0, params=None, prefill=None):
    return NewRequestData(
        req_id, list(prompt), [], params or SamplingParams(), None, blocks, computed, None, prefill_token_ids=prefill
    )


def plan(new=(), cached=None, finished=(), preempted=()):
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = list(new)
    step.scheduled_cached_reqs = cached or CachedRequestData.make_empty()
    step.finished_req_ids = set(finished)
    step.preempted_req_ids = set(preempted)
    return step


def table():
    made = RequestTable(SLOTS, MAX_LEN, 100, torch.device("cpu"))
    made.set_block_tables([BlockTable(SLOTS, -(-MAX_LEN // BLOCK), BLOCK)])
    return made


class Reference:
    """A scheduler that does random things, and what it knows about each request."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.number = 0
        self.next_block = 1
        self.prompt, self.output, self.blocks, self.computed = {}, {}, {}, {}
        self.running, self.waiting = [], []

    def blocks_for(self, req_id, tokens):
        missing = -(-tokens // BLOCK) - len(self.blocks[req_id])
        fresh = list(range(self.next_block, self.next_block + max(missing, 0)))
        self.next_block += len(fresh)
        self.blocks[req_id] += fresh
        return fresh

    def step(self):
        finished = [r for r in self.running + self.waiting if self.random.random() < 0.1]
        for req_id in finished:
            (self.running if req_id in self.running else self.waiting).remove(req_id)
        preempted = [r for r in self.running if self.random.random() < 0.2]
        for req_id in preempted:
            self.running.remove(req_id)
            self.waiting.append(req_id)
            self.computed[req_id], self.blocks[req_id] = 0, []
        cached = CachedRequestData.make_empty()
        counts = {}
        for req_id in self.running:
            # Sometimes a running request gets no token in a step.
            if self.random.random() < 0.8:
                self.plan_cached(cached, req_id, counts)
        resumed = [
            r for r in self.waiting if r not in preempted and len(self.running) < SLOTS and self.random.random() < 0.5
        ]
        for req_id in resumed[: SLOTS - len(self.running)]:
            self.waiting.remove(req_id)
            self.running.append(req_id)
            cached.resumed_req_ids.add(req_id)
            self.plan_cached(cached, req_id, counts, resumed=True)
        new = []
        while len(self.running) < SLOTS and self.random.random() < 0.5:
            new.append(self.plan_new(counts))
        return plan(new, cached, finished, preempted), counts

    def known(self, req_id):
        return self.prompt[req_id] + self.output[req_id]

    def take(self, req_id, counts):
        left = len(self.known(req_id)) - self.computed[req_id]
        counts[req_id] = self.random.randint(1, left)
        return counts[req_id]

    def plan_cached(self, cached, req_id, counts, resumed=False):
        computed = self.computed[req_id]
        fresh = self.blocks_for(req_id, computed + self.take(req_id, counts))
        cached.req_ids.append(req_id)
        cached.new_block_ids.append((fresh,) if fresh else None)
        cached.num_computed_tokens.append(computed)
        cached.num_output_tokens.append(len(self.output[req_id]))
        if resumed:
            cached.all_token_ids[req_id] = self.known(req_id)

    def plan_new(self, counts):
        req_id = f"r{self.number}"
        self.number += 1
        self.prompt[req_id] = [self.random.randrange(100) for _ in range(self.random.randint(1, 15))]
        self.output[req_id], self.blocks[req_id], self.computed[req_id] = [], [], 0
        self.blocks_for(req_id, self.take(req_id, counts))
        self.running.append(req_id)
        return new_data(req_id, self.prompt[req_id], (list(self.blocks[req_id]),))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_the_table_follows_a_scheduler_through_anything(seed):
    reference, requests = Reference(seed), table()
    outputs = {}
    for _ in range(30):
        step, counts = reference.step()
        states = requests.apply(step)
        assert {state.req_id for state in states} == set(counts)
        done = []
        for state in states:
            check(reference, requests, state)
            assert outputs.setdefault(state.req_id, state.output) is state.output
            reference.computed[state.req_id] += counts[state.req_id]
            if reference.computed[state.req_id] == len(reference.known(state.req_id)) < MAX_LEN:
                done.append(state)
        tokens = [reference.random.randrange(100) for _ in done]
        for state, token in zip(done, tokens, strict=True):
            reference.output[state.req_id].append(token)
        requests.append_tokens(done, np.array([state.slot for state in done], np.int64), tokens)
    for req_id in list(requests.states):
        requests.finish(req_id)
    assert not requests.states
    # Every slot is free again.
    requests.apply(plan([new_data(f"last{i}", [1], ([1],)) for i in range(SLOTS)]))


def check(reference, requests, state):
    req_id, slot = state.req_id, state.slot
    known = reference.known(req_id)
    assert requests.token_ids[slot, : len(known)].tolist() == known
    assert list(state.output) == reference.output[req_id]
    assert requests.total_len.np[slot] == len(known)
    assert requests.prompt_len.np[slot] == len(reference.prompt[req_id])
    assert requests.num_computed[slot] == reference.computed[req_id]
    blocks = reference.blocks[req_id]
    assert requests.block_tables[0].ids[slot, : len(blocks)].tolist() == blocks
    assert state.block_ids == [blocks]


def run_one(requests, req_id="a", prompt=(1, 2, 3)):
    (state,) = requests.apply(plan([new_data(req_id, prompt, ([1],))]))
    return state


def give(requests, state, *tokens):
    for token in tokens:
        requests.append_tokens([state], np.array([state.slot]), [token])


def cached(req_id, number_of_output_tokens, blocks=None, resumed=False, tokens=None):
    data = CachedRequestData.make_empty()
    data.req_ids, data.new_block_ids = [req_id], [blocks]
    data.num_computed_tokens, data.num_output_tokens = [0], [number_of_output_tokens]
    if resumed:
        data.resumed_req_ids.add(req_id)
    if tokens is not None:
        data.all_token_ids[req_id] = tokens
    return data


def test_a_preempted_request_keeps_slot_and_output_until_the_slot_is_needed():
    requests = table()
    taken, freed = [], []
    requests.on_slot_taken = lambda state: taken.append(state.req_id)
    requests.on_slot_freed = freed.append
    state = run_one(requests)
    give(requests, state, 7, 8)
    output, slot = state.output, state.slot
    requests.apply(plan(preempted=["a"]))
    requests.apply(plan(cached=cached("a", 2, ([5],), resumed=True, tokens=[1, 2, 3, 7, 8])))
    assert state.slot == slot
    assert taken == ["a"]
    # Four others push it out of its slot; its tokens stay.
    requests.apply(plan(preempted=["a"]))
    requests.apply(plan([new_data(f"b{i}", [1], ([9],)) for i in range(SLOTS)]))
    assert freed == [slot]
    requests.apply(plan(cached=cached("a", 2, ([6],), resumed=True, tokens=[1, 2, 3, 7, 8]), finished=["b1"]))
    assert taken == ["a", "b0", "b1", "b2", "b3", "a"]
    assert state.output is output
    assert output == [7, 8]
    assert requests.token_ids[state.slot, :5].tolist() == [1, 2, 3, 7, 8]
    assert requests.prefill_len.np[state.slot] == 5


def test_a_preempted_request_may_come_back_as_a_new_one():
    requests = table()
    state = run_one(requests)
    give(requests, state, 7)
    requests.apply(plan(preempted=["a"]))
    (again,) = requests.apply(plan([new_data("a", [1, 2, 3], ([4],), prefill=[1, 2, 3, 7])]))
    assert again is state
    assert again.output == [7]


def test_tokens_the_scheduler_took_back_are_gone():
    requests = table()
    state = run_one(requests)
    give(requests, state, 7, 8, 9)
    requests.apply(plan(cached=cached("a", 1)))
    assert state.output == [7]
    assert requests.total_len.np[state.slot] == 4


def test_more_requests_than_slots_is_the_schedulers_mistake():
    requests = table()
    with pytest.raises(RuntimeError, match="max_num_seqs=4"):
        requests.apply(plan([new_data(str(i), [1], ([1],)) for i in range(SLOTS + 1)]))


def test_parameters_that_cannot_be_used_mark_the_request():
    params = SamplingParams()
    params.logit_bias = {"x": 1.0}
    state = RequestState(new_data("a", [1], params=params), 100)
    assert "sampling parameters" in state.fault


class RowFollower:
    """Keeps state per row the way processors do: by index, in a list and in a dict."""

    def __init__(self):
        self.by_dict, self.by_list = {}, []

    def follow(self, update):
        process_dict_updates(self.by_dict, update, lambda params, prompt, output: output)
        if update is None:
            return
        for row in update.removed:
            self.by_list[row] = None
        for row, _, _, output in update.added:
            if row == len(self.by_list):
                self.by_list.append(None)
            self.by_list[row] = output
        for source, target, direction in update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.by_list[target], self.by_list[source] = self.by_list[source], None
        assert all(one is None for one in self.by_list[update.batch_size :])
        del self.by_list[update.batch_size :]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sets(st.integers(0, 9)), max_size=12), st.randoms(use_true_random=False))
def test_whoever_follows_the_rows_knows_whose_each_is(wanted_sets, shuffle):
    states = [RequestState(new_data(str(i), [i]), 100) for i in range(10)]
    rows, follower = DenseRows(), RowFollower()
    for wanted in wanted_sets:
        order = sorted(wanted)
        shuffle.shuffle(order)
        before = list(rows.states)
        update = rows.update([states[i] for i in order])
        follower.follow(update)
        assert {state.req_id for state in rows.states} == {str(i) for i in wanted}
        assert [state.row for state in rows.states] == list(range(len(rows.states)))
        for row, state in enumerate(rows.states):
            assert follower.by_list[row] is state.output
            assert follower.by_dict[row] is state.output
        assert len(follower.by_list) == len(follower.by_dict) == len(rows.states)
        assert update is not None or before == rows.states


def test_rows_that_stay_do_not_move_without_need():
    states = [RequestState(new_data(str(i), [i]), 100) for i in range(4)]
    rows = DenseRows()
    rows.update(states)
    assert rows.update(list(reversed(states))) is None
    update = rows.update([states[0], states[2], states[3]])
    assert [state.req_id for state in rows.states] == ["0", "3", "2"]
    assert update.removed == [1]
    assert update.moved == [(3, 1, MoveDirectionality.UNIDIRECTIONAL)]
    update = rows.update([*rows.states[:2], states[1]])
    assert (update.removed, update.moved) == ([], [])
    assert [entry[0] for entry in update.added] == [2]
