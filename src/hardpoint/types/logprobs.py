"""Log-probabilities: the per-position mapping users see and the array form that crosses processes."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np


@dataclass(slots=True)
class Logprob:
    """One token's natural log-probability, its 1-based vocabulary rank and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]
PromptLogprobs = list[LogprobsOnePosition | None]
SampleLogprobs = list[LogprobsOnePosition]


class LogprobsLists(NamedTuple):
    """Top-k log-probabilities of some positions, as numpy arrays.

    logprob_token_ids    [positions, k + 1] int32; column 0 is the sampled (or prompt) token
    logprobs             [positions, k + 1] float32
    sampled_token_ranks  [positions] int32, 1-based rank of column 0
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_rows(self, start: int, stop: int) -> LogprobsLists:
        """Return positions [start, stop) as views."""
        return LogprobsLists(
            self.logprob_token_ids[start:stop],
            self.logprobs[start:stop],
            self.sampled_token_ranks[start:stop],
        )


class LogprobsTensors(NamedTuple):
    """The device twin of `LogprobsLists`; fields are torch tensors of the same shapes."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None

    def tolists(self) -> LogprobsLists:
        """Copy to host arrays."""
        return LogprobsLists(
            self.logprob_token_ids.to("cpu").numpy().astype(np.int32, copy=False),
            self.logprobs.to("cpu").numpy(),
            self.selected_token_ranks.to("cpu").numpy().astype(np.int32, copy=False),
            self.cu_num_generated_tokens,
        )


@dataclass(eq=False)
class FlatLogprobs(MutableSequence[LogprobsOnePosition | None]):
    """Append-only flat storage of many positions; reads like a list of dicts.

    Cheaper than dicts for long outputs: six lists however many positions there are.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: LogprobsOnePosition | None) -> None:
        """Add one position; None (the first prompt token) adds an empty one."""
        entries = value or {}
        self.append_fast(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position without building a dict."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.end_indices.append(len(self.token_ids))

    def extend(self, values: Iterable[LogprobsOnePosition | None]) -> None:
        """Add several positions."""
        for position in list(values) if values is self else values:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FlatLogprobs):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs:
        if isinstance(index, slice):
            return self._part(range(*index.indices(len(self))))
        entries = range(self.start_indices[index], self.end_indices[index])
        return {self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i]) for i in entries}

    def _part(self, places: range) -> FlatLogprobs:
        part = FlatLogprobs()
        for place in places:
            entries = slice(self.start_indices[place], self.end_indices[place])
            part.append_fast(
                self.token_ids[entries], self.logprobs[entries], self.ranks[entries], self.decoded_tokens[entries]
            )
        return part

    def __setitem__(self, index: int | slice, value: object) -> None:
        raise TypeError("FlatLogprobs only grows: positions cannot be replaced")

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("FlatLogprobs only grows: positions cannot be removed")

    def insert(self, index: int, value: LogprobsOnePosition | None) -> None:
        """Refused with TypeError."""
        raise TypeError("FlatLogprobs only grows at its end")
