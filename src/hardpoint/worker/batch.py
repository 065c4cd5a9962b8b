"""What the worker keeps of every request between steps, and the rows that row-keyed processors see.

A request has a slot: its place in the arrays a step is built from. Slots never move. A request that is
preempted keeps its slot, and what is keyed by it, until somebody else needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hardpoint.contracts.logits_processor import AddedRequest, BatchUpdate, LiveOutput, MoveDirectionality, MovedRequest
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.worker.sampling.buffers import SharedArray
from hardpoint.worker.sampling.request import RequestSampling

NO_SLOT = -1


class RequestState:
    """One request in the worker.

    slot                 its place in the arrays, NO_SLOT while it waits and somebody else has it
    row                  its row in `DenseRows`, -1 when it is not there
    output               live list of its output tokens, the same object all its life
    block_ids            per KV cache group: its blocks, in token order
    fault                why it must end, or nothing
    prompt_logprobs      parts for the prompt rows computed so far; None when not asked for or handed out
    """

    __slots__ = (
        "block_ids",
        "fault",
        "lora_request",
        "output",
        "params",
        "pooling_params",
        "prefill_len",
        "prompt",
        "prompt_logprobs",
        "req_id",
        "row",
        "sampling",
        "slot",
        "waits",
    )

    def __init__(self, data: NewRequestData, vocab_size: int) -> None:
        self.req_id = data.req_id
        self.prompt: list[int] = list(data.prompt_token_ids or ())
        known = data.prefill_token_ids or self.prompt
        self.output = LiveOutput(known[len(self.prompt) :])
        self.prefill_len = len(known)
        self.params = data.sampling_params or SamplingParams()
        self.lora_request = data.lora_request
        self.pooling_params = data.pooling_params
        self.block_ids = [list(ids) for ids in data.block_ids]
        self.slot = NO_SLOT
        self.row = -1
        self.waits = False
        self.fault = ""
        self.prompt_logprobs: list[LogprobsLists] | None = None if self.params.prompt_logprobs is None else []
        try:
            self.sampling = RequestSampling(self.params, self.prompt, self.output, vocab_size)
        except (TypeError, ValueError) as error:
            # Its tokens are still computed, so that its blocks hold what others may find there.
            self.fault = f"the sampling parameters cannot be used: {error}"
            self.sampling = RequestSampling(SamplingParams(), self.prompt, self.output, vocab_size)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output)

    def set_output(self, token_ids: Sequence[int]) -> bool:
        """Take over the scheduler's view of the output; returns whether tokens were taken back or replaced."""
        if len(token_ids) >= len(self.output) and list(token_ids[: len(self.output)]) == self.output:
            self.output.extend(token_ids[len(self.output) :])
            return False
        self.output[:] = token_ids
        self.sampling.output_was_cut()
        return True


class BlockTable:
    """Per slot, the blocks of one KV cache group."""

    def __init__(self, num_slots: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids = np.zeros((num_slots, max_blocks), np.int32)
        self._count = np.zeros(num_slots, np.int32)

    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        """Set all blocks of a slot."""
        self._count[slot] = 0
        self.append(slot, block_ids)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Add blocks to a slot."""
        start = self._count[slot]
        self.ids[slot, start : start + len(block_ids)] = block_ids
        self._count[slot] = start + len(block_ids)

    def slots_of_tokens(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Cache slot of each token: [tokens] int64 from the tokens' request slots and positions."""
        block = self.ids[slots, positions // self.block_size].astype(np.int64)
        return block * self.block_size + positions % self.block_size


class RequestTable:
    """All requests of a worker, by id and by slot.

    token_ids     [slots, max_model_len + 1] int32: prompt, then output
    prompt_len, prefill_len, total_len, num_computed   [slots] int32

    The attributes that slot-keyed processors read are there under vLLM's names.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        # Zeroed lazily by the system: only rows and columns in use take memory.
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), np.int32)
        self._prompt_len, self._prefill_len, self._total_len, self.num_computed = np.zeros((4, max_num_reqs), np.int32)
        self.all_token_ids = SharedArray(self.token_ids, device)
        self.prompt_len = SharedArray(self._prompt_len, device)
        self.prefill_len = SharedArray(self._prefill_len, device)
        self.total_len = SharedArray(self._total_len, device)
        self.block_tables: list[BlockTable] = []
        self.states: dict[str, RequestState] = {}
        # Changes whenever what the rows of a step mean may have changed.
        self.version = 0
        self._free = list(range(max_num_reqs - 1, -1, -1))
        self.on_slot_taken: Callable[[RequestState], None] = lambda state: None
        self.on_slot_freed: Callable[[int], None] = lambda slot: None

    def set_block_tables(self, tables: Sequence[BlockTable]) -> None:
        """Set one table per KV cache group; before the first request."""
        self.block_tables = list(tables)

    def apply(self, plan: SchedulerOutput) -> list[RequestState]:
        """Take in a step's changes; returns the requests of the step, running ones first."""
        for req_id in plan.finished_req_ids:
            self.finish(req_id)
        for req_id in plan.preempted_req_ids or ():
            state = self.states.get(req_id)
            if state is not None:
                state.waits = True
        scheduled = self._apply_cached(plan.scheduled_cached_reqs)
        scheduled += [self._add(data) for data in plan.scheduled_new_reqs]
        return scheduled

    def finish(self, req_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        state = self.states.pop(req_id, None)
        if state is not None:
            self._release(state)

    def append_tokens(self, states: Sequence[RequestState], slots: np.ndarray, tokens: Sequence[int]) -> None:
        """Give each request its new token."""
        for state, token in zip(states, tokens, strict=True):
            state.output.append(token)
        self.token_ids[slots, self._total_len[slots]] = tokens
        self._total_len[slots] += 1

    def _apply_cached(self, cached: CachedRequestData) -> list[RequestState]:
        states = [self.states[req_id] for req_id in cached.req_ids]
        for index, state in enumerate(states):
            if state.req_id in cached.resumed_req_ids:
                self._resume(state, cached.all_token_ids.get(state.req_id), cached.new_block_ids[index] or ())
                continue
            if state.slot == NO_SLOT:
                self._take_slot(state)
            blocks = cached.new_block_ids[index]
            if blocks is not None:
                self._append_blocks(state, blocks)
            number = cached.num_output_tokens[index]
            if number != len(state.output):
                self._reconcile(state, number, cached, index)
        if states:
            self.num_computed[[state.slot for state in states]] = cached.num_computed_tokens
        return states

    def _reconcile(self, state: RequestState, number: int, cached: CachedRequestData, index: int) -> None:
        """Bring the output to what the scheduler says it is."""
        known = cached.all_token_ids.get(state.req_id)
        if known is not None:
            output = known[len(state.prompt) :]
        else:
            # Tokens that another rank sampled come along; tokens beyond what the scheduler counts were taken back.
            fresh = cached.new_token_ids[index] if cached.new_token_ids else []
            output = (list(state.output) + list(fresh))[:number]
        state.set_output(output)
        self._write_tokens(state)
        self.version += 1

    def _resume(self, state: RequestState, token_ids: list[int] | None, blocks: Sequence[Sequence[int]]) -> None:
        state.waits = False
        state.block_ids = [list(ids) for ids in blocks]
        if token_ids is not None:
            state.set_output(token_ids[len(state.prompt) :])
        state.prefill_len = state.num_tokens
        if state.slot == NO_SLOT:
            self._take_slot(state)
        else:
            self._write_tokens(state)
            self._write_blocks(state)
        self.version += 1

    def _add(self, data: NewRequestData) -> RequestState:
        state = self.states.get(data.req_id)
        if state is not None:
            # Sent whole after a preemption: the same request, with the state it had.
            self._resume(state, data.prefill_token_ids, data.block_ids)
        else:
            state = self.states[data.req_id] = RequestState(data, self.vocab_size)
            self._take_slot(state)
        self.num_computed[state.slot] = data.num_computed_tokens
        return state

    def _append_blocks(self, state: RequestState, blocks: Sequence[Sequence[int]]) -> None:
        for kept, new, table in zip(state.block_ids, blocks, self.block_tables, strict=True):
            kept.extend(new)
            table.append(state.slot, new)

    def _take_slot(self, state: RequestState) -> None:
        if not self._free:
            self._evict_waiting()
        state.slot = self._free.pop()
        self._write_tokens(state)
        self._write_blocks(state)
        self.version += 1
        self.on_slot_taken(state)

    def _evict_waiting(self) -> None:
        victim = next((state for state in self.states.values() if state.waits and state.slot != NO_SLOT), None)
        if victim is None:
            raise RuntimeError(f"the scheduler runs more than max_num_seqs={self.max_num_reqs} requests")
        self._release(victim)

    def _release(self, state: RequestState) -> None:
        if state.slot != NO_SLOT:
            self.on_slot_freed(state.slot)
            self._free.append(state.slot)
            state.slot = NO_SLOT
        self.version += 1

    def _write_tokens(self, state: RequestState) -> None:
        slot, prompt_len, total = state.slot, len(state.prompt), state.num_tokens
        self.token_ids[slot, :prompt_len] = state.prompt
        self.token_ids[slot, prompt_len:total] = state.output
        self._prompt_len[slot] = prompt_len
        self._prefill_len[slot] = state.prefill_len
        self._total_len[slot] = total

    def _write_blocks(self, state: RequestState) -> None:
        for table, block_ids in zip(self.block_tables, state.block_ids, strict=True):
            table.replace(state.slot, block_ids)


class DenseRows:
    """The requests that get a token, as rows without gaps, for row-keyed (V1) logits processors.

    A request joins when it first gets a token and leaves when it ends, waits or is computed again. Freed
    rows are given to new requests, lowest first; what is left free is filled by moving the last rows down.
    """

    def __init__(self) -> None:
        self.states: list[RequestState] = []

    @property
    def entries(self) -> list[AddedRequest]:
        """All rows, in the form a processor is told of new ones."""
        return [self._entry(state) for state in self.states]

    def update(self, wanted: Sequence[RequestState]) -> BatchUpdate | None:
        """Make the rows hold exactly `wanted`; returns what a processor must follow, None for nothing."""
        keep = {id(state) for state in wanted}
        freed = [row for row, state in enumerate(self.states) if id(state) not in keep]
        joining = [state for state in wanted if state.row < 0]
        if not freed and not joining:
            return None
        for row in freed:
            self.states[row].row = -1
        added = []
        for state in joining:
            row = freed.pop(0) if freed else len(self.states)
            self.states[row : row + 1] = [state]
            state.row = row
            added.append(self._entry(state))
        moved = self._condense(freed)
        return BatchUpdate(len(self.states), freed, added, moved)

    def _condense(self, freed: Sequence[int]) -> list[MovedRequest]:
        gaps, moved, size = set(freed), [], len(self.states)
        for gap in freed:
            while size - 1 in gaps:
                size -= 1
            if gap >= size:
                break
            size -= 1
            state = self.states[gap] = self.states[size]
            state.row = gap
            moved.append((size, gap, MoveDirectionality.UNIDIRECTIONAL))
        del self.states[len(self.states) - len(freed) :]
        return moved

    @staticmethod
    def _entry(state: RequestState) -> AddedRequest:
        return state.row, state.params, state.prompt, state.output
