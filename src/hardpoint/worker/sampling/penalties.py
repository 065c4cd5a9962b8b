"""Repetition, frequency and presence penalties, applied to the tokens that occurred and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from hardpoint.worker.sampling.request import RequestSampling


class TokenCounts:
    """The distinct tokens of a prompt and its output, with how often each occurred in the output.

    ids     [size] int64, distinct          counts  [size] float32, 0 for tokens of the prompt only
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        distinct = [token for token in dict.fromkeys(prompt_token_ids) if 0 <= token < vocab_size]
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.array(distinct or [0], np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._followed = 0

    def follow(self, output_token_ids: list[int]) -> None:
        """Count the tokens added to the output since the last call."""
        for position in range(self._followed, len(output_token_ids)):
            token = output_token_ids[position]
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._followed = len(output_token_ids)

    def __len__(self) -> int:
        return len(self._place)

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> np.ndarray:
        """Their number in the output."""
        return self._counts[: len(self)]


def apply_penalties(logits: Tensor, penalised: list[tuple[int, RequestSampling]]) -> None:
    """Penalise in place, vLLM's way: repetition scales, then frequency and presence subtract.

    logits     [rows, vocab] float32
    penalised  (row, request) of the rows with a penalty
    """
    counts = [request.counts() for _, request in penalised]
    sizes = [len(count) for count in counts]
    if not sum(sizes):
        return
    rows = np.repeat(np.array([row for row, _ in penalised], np.int64), sizes)
    settings = np.array(
        [(r.params.repetition_penalty, r.params.frequency_penalty, r.params.presence_penalty) for _, r in penalised],
        np.float32,
    )
    place = (
        torch.from_numpy(rows).to(logits.device),
        torch.from_numpy(np.concatenate([count.ids for count in counts])).to(logits.device),
    )
    occurrences = torch.from_numpy(np.concatenate([count.counts for count in counts])).to(logits.device)
    repetition, frequency, presence = torch.from_numpy(np.repeat(settings, sizes, axis=0)).to(logits.device).unbind(-1)
    values = logits[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurrences + presence * (occurrences > 0)
    logits[place] = values
