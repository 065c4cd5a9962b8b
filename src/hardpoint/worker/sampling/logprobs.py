"""Log-probabilities of the chosen token and of the best ones, or of given ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hardpoint.types.logprobs import LogprobsTensors
from hardpoint.worker.kernels.ops import log_sums


def gather_logprobs(
    scores: Tensor,
    chosen: Tensor,
    num_best: int,
    *,
    as_logits: bool = False,
    asked_ids: Sequence[Sequence[int] | None] | None = None,
) -> LogprobsTensors:
    """Score the chosen token and `num_best` others in each row.

    scores     [rows, vocab] float32 logits
    chosen     [rows] int64 token of each row
    as_logits  report the logits themselves instead of natural log-probabilities
    asked_ids  per row: ids to report instead of the best ones (at most `num_best`), or None
    ->         ids [rows, num_best + 1] int32, values likewise float32, 1-based ranks of the chosen [rows] int32
    """
    chosen_column = chosen.unsqueeze(-1)
    chosen_score = scores.gather(-1, chosen_column)
    ranks = (scores > chosen_score).sum(-1) + 1
    if num_best:
        best_scores, best = scores.topk(num_best, dim=-1)
        for row, ids in enumerate(asked_ids or ()):
            if ids is not None:
                asked = torch.tensor(ids, dtype=best.dtype, device=best.device)
                best[row, : len(ids)] = asked
                best_scores[row, : len(ids)] = scores[row, asked]
        columns, values = torch.cat((chosen_column, best), -1), torch.cat((chosen_score, best_scores), -1)
    else:
        columns, values = chosen_column, chosen_score
    if not as_logits:
        values -= log_sums(scores)
    return LogprobsTensors(columns.to(torch.int32), values, ranks.to(torch.int32))


def spread_rows(part: LogprobsTensors, rows: Sequence[int], num_rows: int) -> LogprobsTensors:
    """Place the results of some rows among `num_rows`; the other rows hold zeros."""
    if len(rows) == num_rows:
        return part
    index = torch.tensor(list(rows), device=part.logprobs.device)
    spread = [field.new_zeros((num_rows, *field.shape[1:])).index_copy_(0, index, field) for field in part[:3]]
    return LogprobsTensors(*spread)
