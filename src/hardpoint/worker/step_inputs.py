"""The flat tensors of one step: every scheduled token of every request, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hardpoint.contracts.attention_backend import CommonAttentionMetadata
from hardpoint.worker.batch import RequestState, RequestTable


@dataclass
class StepInputs:
    """A step's requests and tokens.

    states           the requests, in the order of their tokens
    slots            [requests] their slots
    num_tokens       [requests] tokens of each in this step
    num_computed     [requests] tokens of each that earlier steps computed
    seq_lens         [requests] both together
    starts           [requests + 1] where each request's tokens start
    token_slots      [tokens] slot of each token's request
    positions        [tokens] position of each token in its request
    completes        [requests] whether all known tokens are computed with this step, so that a new one follows
    """

    states: list[RequestState]
    slots: np.ndarray
    num_tokens: np.ndarray
    num_computed: np.ndarray
    seq_lens: np.ndarray
    starts: np.ndarray
    token_slots: np.ndarray
    positions: np.ndarray
    completes: np.ndarray

    @property
    def last_rows(self) -> np.ndarray:
        """[requests] row of each request's last token."""
        return self.starts[1:] - 1

    @property
    def total_tokens(self) -> int:
        """Tokens in the step."""
        return int(self.starts[-1])


def build_step(
    table: RequestTable, states: Sequence[RequestState], counts: Mapping[str, int], decodes_first_up_to: int | None
) -> StepInputs:
    """Lay the tokens of a step out.

    counts               request id -> tokens in this step
    decodes_first_up_to  an attention backend's wish: requests with at most so many tokens come first
    """
    states = [state for state in states if counts.get(state.req_id)]
    if decodes_first_up_to is not None:
        states.sort(key=lambda state: counts[state.req_id] > decodes_first_up_to)
    slots = np.array([state.slot for state in states], np.int64)
    num_tokens = np.array([counts[state.req_id] for state in states], np.int64)
    num_computed = table.num_computed[slots].astype(np.int64)
    starts = np.zeros(len(states) + 1, np.int64)
    np.cumsum(num_tokens, out=starts[1:])
    if int(starts[-1]) == len(states):
        token_slots, positions = slots, num_computed
    else:
        token_slots = np.repeat(slots, num_tokens)
        positions = np.arange(starts[-1]) + np.repeat(num_computed - starts[:-1], num_tokens)
    seq_lens = num_computed + num_tokens
    return StepInputs(
        states=states,
        slots=slots,
        num_tokens=num_tokens,
        num_computed=num_computed,
        seq_lens=seq_lens,
        starts=starts,
        token_slots=token_slots,
        positions=positions,
        completes=seq_lens >= table.total_len.np[slots],
    )


def model_inputs(table: RequestTable, step: StepInputs) -> tuple[Tensor, Tensor]:
    """What the model computes: token ids [tokens] int32 and positions [tokens] int64."""
    token_ids = table.token_ids[step.token_slots, step.positions]
    return torch.from_numpy(token_ids).to(table.device), torch.from_numpy(step.positions).to(table.device)


def attention_inputs(table: RequestTable, step: StepInputs, positions: Tensor) -> list[CommonAttentionMetadata]:
    """What attention has to know, for each KV cache group."""
    starts = torch.from_numpy(step.starts.astype(np.int32))
    seq_lens = torch.from_numpy(step.seq_lens.astype(np.int32))
    on_device = starts.to(table.device), seq_lens.to(table.device)
    longest = int(step.seq_lens.max())
    common = []
    for blocks in table.block_tables:
        used = -(-longest // blocks.block_size)
        common.append(
            CommonAttentionMetadata(
                query_start_loc=on_device[0],
                query_start_loc_cpu=starts,
                seq_lens=on_device[1],
                num_reqs=len(step.states),
                num_actual_tokens=step.total_tokens,
                max_query_len=int(step.num_tokens.max()),
                max_seq_len=longest,
                block_table_tensor=torch.from_numpy(blocks.ids[step.slots, :used]).to(table.device),
                slot_mapping=torch.from_numpy(blocks.slots_of_tokens(step.token_slots, step.positions)).to(
                    table.device
                ),
                positions=positions,
                seq_lens_cpu_upper_bound=seq_lens,
            )
        )
    return common
