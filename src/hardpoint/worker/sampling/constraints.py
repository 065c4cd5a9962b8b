"""Built-in rules on single tokens: grammar, logit bias, bad words, min_tokens, allowed ids.

Each function changes `logits` [rows, vocab] float32 in place and takes (row, request) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hardpoint.worker.sampling.request import RequestSampling

_FORBIDDEN = float("-inf")
RowRequests = Sequence[tuple[int, RequestSampling]]


def apply_grammar(logits: Tensor, rows: Sequence[int], bitmask: np.ndarray) -> None:
    """Forbid what a grammar does not allow next.

    rows     logits row of each row of the mask
    bitmask  [len(rows), ceil(vocab / 32)] int32; bit j % 32 of word j // 32 set = token j allowed
    """
    if not rows:
        return
    bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), axis=-1, bitorder="little")
    vocab = logits.shape[-1]
    forbidden = np.ones((len(rows), vocab), np.bool_)
    known = min(vocab, bits.shape[-1])
    forbidden[:, :known] = bits[:, :known] == 0
    index = torch.tensor(list(rows), device=logits.device)
    logits[index] = logits[index].masked_fill_(torch.from_numpy(forbidden).to(logits.device), _FORBIDDEN)


class LogitBias:
    """The biases of some rows as one scatter, built once per set of rows."""

    def __init__(self, biased: RowRequests, device: torch.device) -> None:
        ids = [request.bias_ids for _, request in biased if request.bias_ids is not None]
        values = [request.bias_values for _, request in biased if request.bias_values is not None]
        rows = np.repeat(np.array([row for row, _ in biased], np.int64), [len(part) for part in ids])
        self._place = (torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(ids)).to(device))
        self._values = torch.from_numpy(np.concatenate(values)).to(device)

    def apply(self, logits: Tensor) -> None:
        """Add the biases."""
        logits[self._place] += self._values


def apply_bad_words(logits: Tensor, rows: RowRequests) -> None:
    """Forbid the last token of each bad word whose other tokens are the newest of the output."""
    _forbid(logits, ((row, ids) for row, request in rows if (ids := _completions(request))))


def _completions(request: RequestSampling) -> list[int]:
    output = request.output_token_ids
    return [
        word[-1]
        for word in request.bad_words or ()
        if len(word) == 1 or (len(output) >= len(word) - 1 and tuple(output[1 - len(word) :]) == word[:-1])
    ]


def apply_min_tokens(logits: Tensor, rows: RowRequests) -> None:
    """Forbid every token that would end an output that is still shorter than its `min_tokens`."""
    held = ((row, request.stop_ids) for row, request in rows if request.holds_stops and request.stop_ids is not None)
    _forbid(logits, held)


def _forbid(logits: Tensor, tokens_of_rows: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> None:
    pairs = [(row, int(token)) for row, tokens in tokens_of_rows for token in tokens]
    if pairs:
        place = torch.tensor(pairs, device=logits.device)
        logits[place[:, 0], place[:, 1]] = _FORBIDDEN


def apply_allowed_ids(logits: Tensor, rows: RowRequests) -> None:
    """Forbid all but a request's allowed ids."""
    for row, request in rows:
        assert request.allowed_ids is not None
        allowed = request.allowed_ids.to(logits.device)
        kept = logits[row, allowed]
        logits[row] = _FORBIDDEN
        logits[row, allowed] = kept
