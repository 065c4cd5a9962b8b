"""What a pooler is told of the requests whose hidden states it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hardpoint.types.pooling_params import PoolingParams


@dataclass
class PoolingCursor:
    """Where each request's rows are.

    first_token_indices_gpu, last_token_indices_gpu  [requests] rows in the hidden states
    prompt_lens_cpu           [requests] prompt tokens of each
    num_scheduled_tokens_cpu  [requests] rows of each; fewer than the prompt's where a prefix was cached
    """

    first_token_indices_gpu: Tensor
    last_token_indices_gpu: Tensor
    prompt_lens_cpu: Tensor
    num_scheduled_tokens_cpu: Tensor

    def __getitem__(self, indices: Any) -> PoolingCursor:
        """The rows of some requests."""
        return PoolingCursor(
            self.first_token_indices_gpu[indices],
            self.last_token_indices_gpu[indices],
            self.prompt_lens_cpu[indices],
            self.num_scheduled_tokens_cpu[indices],
        )

    def is_partial_prefill(self) -> bool:
        """Whether some request has fewer rows than tokens."""
        return not bool(torch.equal(self.prompt_lens_cpu, self.num_scheduled_tokens_cpu))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First row and the one past the last, of each request."""
        first, last = self.first_token_indices_gpu.tolist(), self.last_token_indices_gpu.tolist()
        return [(start, end + 1) for start, end in zip(first, last, strict=True)]


@dataclass
class PoolingStates:
    """Room for what a pooler keeps of a request; the rows of one request always come together, so ours keep nothing."""

    hidden_states_cache: list[Tensor] = field(default_factory=list)

    def clean(self) -> None:
        """Forget it."""
        self.hidden_states_cache.clear()


@dataclass
class PoolingMetadata:
    """The requests of one call of a pooler.

    prompt_lens       [requests] on the processor
    prompt_token_ids  [requests, longest prompt] padded with zeros; None unless a request's pooler asked for them
    pooling_params    of each request; `task` is set
    """

    prompt_lens: Tensor
    prompt_token_ids: Tensor | None
    pooling_params: list[PoolingParams]
    pooling_states: list[PoolingStates] = field(default_factory=list)
    pooling_cursor: PoolingCursor | None = None
    prompt_token_ids_cpu: Tensor | None = None

    @property
    def tasks(self) -> list[str]:
        """The task of each request."""
        return [params.task or "" for params in self.pooling_params]

    def __getitem__(self, indices: slice) -> PoolingMetadata:
        """The same for some requests."""
        return PoolingMetadata(
            self.prompt_lens[indices],
            None if self.prompt_token_ids is None else self.prompt_token_ids[indices],
            self.pooling_params[indices],
            self.pooling_states[indices],
            None if self.pooling_cursor is None else self.pooling_cursor[indices],
            None if self.prompt_token_ids_cpu is None else self.prompt_token_ids_cpu[indices],
        )

    def get_prompt_token_ids(self) -> list[Tensor]:
        """Token ids of each request's prompt. AssertionError when the pooler did not ask for them."""
        assert self.prompt_token_ids is not None, "the pooler asks for them with PoolingParamsUpdate"
        return [row[:length] for row, length in zip(self.prompt_token_ids, self.prompt_lens.tolist(), strict=True)]

    def get_prompt_token_ids_cpu(self) -> list[Tensor]:
        """The same on the processor."""
        return [ids.cpu() for ids in self.get_prompt_token_ids()]

    def get_pooling_cursor(self) -> PoolingCursor:
        """Where the rows are."""
        assert self.pooling_cursor is not None, "build_pooling_cursor comes first"
        return self.pooling_cursor

    def build_pooling_cursor(
        self, num_scheduled_tokens: Sequence[int], seq_lens_cpu: Tensor | None = None, device: Any = None
    ) -> None:
        """Note how many rows each request has; they lie one request after the other."""
        counts = torch.tensor(list(num_scheduled_tokens), dtype=torch.int64)
        ends = counts.cumsum(0)
        self.pooling_cursor = PoolingCursor(
            (ends - counts).to(device or "cpu"), (ends - 1).to(device or "cpu"), self.prompt_lens, counts
        )
