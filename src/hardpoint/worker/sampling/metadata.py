"""What the sampler must know about the rows of a step; built anew only when the set of rows changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.worker.sampling.constraints import LogitBias
from hardpoint.worker.sampling.request import RequestSampling

if TYPE_CHECKING:
    from hardpoint.worker.sampling.logits_processors import LogitsProcessors

RowRequest = tuple[int, RequestSampling]


@dataclass(frozen=True)
class Draw:
    """Rows that draw in the same way.

    rows      [n] int64 row numbers
    places    [n] int64 places of the same within `SamplingMetadata.random_rows`
    filtered  whether they have a top_k, top_p or min_p
    seeded    the requests, if each has a seed of its own; else empty
    keys      [n] uint64, their seeds' keys
    """

    rows: Tensor
    places: Tensor
    filtered: bool
    seeded: list[RequestSampling]
    keys: np.ndarray


@dataclass
class SamplingMetadata:
    """The requests that get a token in this step, in row order, sorted by what they need.

    temperature                [rows] float32, 1 for greedy rows; None when all are greedy
    top_k, top_p, min_p        [rows] int64 / float32 / float32, off = vocab / 1 / 0; None when all are off
    greedy_rows, random_rows   [n] int64 row numbers
    draws                      the random rows by the way they draw, each once
    max_num_logprobs           columns of log-probabilities besides the chosen token's; None = nobody asked
    output_token_ids           the rows' live output lists
    slots                      [rows] the requests' slots
    context                    makes the `LogitsContext` of slot-keyed custom processors
    drawing                    what the CPU kernels draw by (`drawing`), once it was made
    """

    requests: list[RequestSampling]
    all_greedy: bool
    all_random: bool
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    greedy_rows: Tensor
    random_rows: Tensor
    draws: list[Draw]
    max_num_logprobs: int | None
    logprob_rows: list[int]
    penalised: list[RowRequest] = field(default_factory=list)
    bias: LogitBias | None = None
    bad_words: list[RowRequest] = field(default_factory=list)
    min_tokens: list[RowRequest] = field(default_factory=list)
    allowed: list[RowRequest] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    logitsprocs: LogitsProcessors | None = None
    context: Callable[[], Any] = field(default=lambda: None)
    drawing: Any = None

    @property
    def no_penalties(self) -> bool:
        """Whether no row has a penalty."""
        return not self.penalised

    @property
    def output_token_ids(self) -> list[list[int]]:
        """The rows' live output lists."""
        return [request.output_token_ids for request in self.requests]

    @property
    def prompt_token_ids(self) -> list[list[int]]:
        """The rows' prompts."""
        return [request.prompt_token_ids for request in self.requests]

    @property
    def constrained(self) -> bool:
        """Whether a built-in rule changes logits."""
        return bool(self.penalised or self.bias or self.bad_words or self.min_tokens or self.allowed)

    @property
    def num_rows(self) -> int:
        """How many tokens are chosen."""
        return len(self.requests)


def build_metadata(
    requests: Sequence[RequestSampling],
    device: torch.device,
    slots: np.ndarray | None = None,
    logitsprocs: LogitsProcessors | None = None,
    context: Callable[[], Any] | None = None,
) -> SamplingMetadata:
    """Sort `requests`, one per row, by what they need; `slots` are their slots, 0, 1, ... unless given."""
    rows = list(enumerate(requests))
    random = [row for row, request in rows if not request.greedy]
    asked = [(row, request.num_logprobs) for row, request in rows if request.num_logprobs is not None]
    biased = [(row, request) for row, request in rows if request.bias_ids is not None]
    return SamplingMetadata(
        requests=list(requests),
        all_greedy=not random,
        all_random=len(random) == len(rows),
        greedy_rows=_rows([row for row, request in rows if request.greedy], device),
        random_rows=_rows(random, device),
        draws=_draws(requests, random, device),
        **_filters(requests, random, device),
        max_num_logprobs=max(number for _, number in asked) if asked else None,
        logprob_rows=[row for row, _ in asked],
        penalised=[(row, request) for row, request in rows if request.penalised],
        bias=LogitBias(biased, device) if biased else None,
        bad_words=[(row, request) for row, request in rows if request.bad_words],
        min_tokens=[(row, request) for row, request in rows if request.holds_stops],
        allowed=[(row, request) for row, request in rows if request.allowed_ids is not None],
        slots=np.arange(len(rows)) if slots is None else slots,
        logitsprocs=logitsprocs,
        context=context or _no_context,
    )


def _draws(requests: Sequence[RequestSampling], random: Sequence[int], device: torch.device) -> list[Draw]:
    draws = []
    for filtered, seeded in itertools.product((False, True), repeat=2):
        places = [
            place
            for place, row in enumerate(random)
            if requests[row].filtered == filtered and (requests[row].seed is not None) == seeded
        ]
        if places:
            rows = [random[place] for place in places]
            owners = [requests[row] for row in rows] if seeded else []
            keys = np.array([request.seed for request in owners], np.uint64)
            draws.append(Draw(_rows(rows, device), _rows(places, device), filtered, owners, keys))
    return draws


def _filters(requests: Sequence[RequestSampling], random: Sequence[int], device: torch.device) -> dict[str, Any]:
    """The fields about temperature, top_k, top_p and min_p; `random` are the rows that draw."""
    fields: dict[str, Any] = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    if random:
        degrees = [1.0 if request.greedy else request.params.temperature for request in requests]
        fields["temperature"] = torch.tensor(degrees, dtype=torch.float32).to(device)
    if any(requests[row].filtered for row in random):
        fields["top_k"] = torch.tensor([request.top_k for request in requests], dtype=torch.int64).to(device)
        fields["top_p"] = torch.tensor([request.top_p for request in requests], dtype=torch.float32).to(device)
        fields["min_p"] = torch.tensor([request.min_p for request in requests], dtype=torch.float32).to(device)
    return fields


def _rows(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def _no_context() -> Any:
    raise AssertionError("these rows were described without the slots of a worker")
