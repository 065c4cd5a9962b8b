"""Log-probabilities of a prompt's own tokens, gathered over the chunks the prompt is computed in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hardpoint.types.logprobs import LogprobsLists
from hardpoint.worker.batch import RequestState
from hardpoint.worker.sampling.logprobs import gather_logprobs
from hardpoint.worker.step_inputs import StepInputs

# (hidden states, which of the step's tokens they belong to) -> logits
ComputeLogits = Callable[[Tensor, np.ndarray], Tensor]

# Rows whose logits are held at once.
_ROWS = 64


def collect_prompt_logprobs(
    step: StepInputs,
    hidden: Tensor,
    compute_logits: ComputeLogits,
    vocab_size: int,
    as_logits: bool,
) -> dict[str, LogprobsLists | None]:
    """Score the prompt tokens this step makes known; hand out what prompts that are complete have.

    hidden  [tokens, hidden]
    Returns request id -> rows for the whole prompt (row i scores token i + 1), None while it is not complete.
    """
    results: dict[str, LogprobsLists | None] = {}
    for index, state in enumerate(step.states):
        if state.prompt_logprobs is None or state.fault:
            continue
        _add_chunk(step, index, state, hidden, compute_logits, vocab_size, as_logits)
        done = int(step.seq_lens[index]) >= len(state.prompt)
        results[state.req_id] = _joined(state.prompt_logprobs, state, vocab_size) if done else None
        if done:
            state.prompt_logprobs = None
    return results


def _add_chunk(
    step: StepInputs,
    index: int,
    state: RequestState,
    hidden: Tensor,
    compute_logits: ComputeLogits,
    vocab_size: int,
    as_logits: bool,
) -> None:
    """Score the targets of the chunk's rows: each row speaks of the token after it."""
    assert state.prompt_logprobs is not None
    first = int(step.num_computed[index])
    # Computed again after a preemption: the rows from here on are made anew.
    state.prompt_logprobs = _first_rows(state.prompt_logprobs, first)
    rows = min(int(step.seq_lens[index]), len(state.prompt) - 1) - first
    start = int(step.starts[index])
    for offset in range(0, max(rows, 0), _ROWS):
        count = min(_ROWS, rows - offset)
        at = np.arange(start + offset, start + offset + count)
        logits = compute_logits(hidden[at[0] : at[-1] + 1], at)
        target = first + offset + 1
        tokens = torch.tensor(state.prompt[target : target + count], dtype=torch.int64, device=logits.device)
        part = gather_logprobs(logits.to(torch.float32), tokens, prompt_columns(state, vocab_size), as_logits=as_logits)
        state.prompt_logprobs.append(part.tolists())


def prompt_columns(state: RequestState, vocab_size: int) -> int:
    """How many tokens besides the prompt's own a request wants scored in each row."""
    number = state.params.prompt_logprobs or 0
    return vocab_size if number == -1 else min(number, vocab_size)


def _first_rows(parts: list[LogprobsLists], num_rows: int) -> list[LogprobsLists]:
    kept: list[LogprobsLists] = []
    for part in parts:
        if num_rows <= 0:
            break
        kept.append(part.slice_rows(0, num_rows))
        num_rows -= len(part.logprobs)
    return kept


def _joined(parts: list[LogprobsLists], state: RequestState, vocab_size: int) -> LogprobsLists:
    if not parts:
        columns = prompt_columns(state, vocab_size) + 1
        return LogprobsLists(
            np.zeros((0, columns), np.int32), np.zeros((0, columns), np.float32), np.zeros(0, np.int32)
        )
    return LogprobsLists(
        np.concatenate([part.logprob_token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.sampled_token_ranks for part in parts]),
    )
