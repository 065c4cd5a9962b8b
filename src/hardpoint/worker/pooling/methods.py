"""Which rows of hidden states a pooler takes: one per sequence, or all of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from hardpoint.worker.pooling.metadata import PoolingMetadata


class SequencePoolingMethod(nn.Module, ABC):
    """[rows, hidden] of all requests -> [requests, hidden]."""

    @abstractmethod
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Tensor:
        """One vector per request."""


class CLSPool(SequencePoolingMethod):
    """The first token's."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Tensor:
        """[requests, hidden]."""
        cursor = pooling_metadata.get_pooling_cursor()
        assert not cursor.is_partial_prefill(), "the first token's state was left out of the step"
        return hidden_states[cursor.first_token_indices_gpu]


class LastPool(SequencePoolingMethod):
    """The last token's."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Tensor:
        """[requests, hidden]."""
        return hidden_states[pooling_metadata.get_pooling_cursor().last_token_indices_gpu]


class MeanPool(SequencePoolingMethod):
    """The mean over all tokens, summed in float32 for each request by itself."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Tensor:
        """[requests, hidden]."""
        cursor = pooling_metadata.get_pooling_cursor()
        assert not cursor.is_partial_prefill(), "tokens were left out of the step"
        means = [hidden_states[start:end].float().mean(dim=0) for start, end in cursor.spans]
        return torch.stack(means)


class TokenPoolingMethod(nn.Module, ABC):
    """[rows, hidden] of all requests -> [tokens, hidden] for each."""

    @abstractmethod
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """The rows of each request."""


class AllPool(TokenPoolingMethod):
    """Every token's."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """[tokens, hidden] of each request."""
        cursor = pooling_metadata.get_pooling_cursor()
        assert not cursor.is_partial_prefill(), "tokens were left out of the step"
        return [hidden_states[start:end] for start, end in cursor.spans]


class StepPool(AllPool):
    """The rows at the tokens `step_tag_id`, and of these the columns `returned_token_ids`."""

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        """[steps, columns] of each request."""
        rows = super().forward(hidden_states, pooling_metadata)
        found = []
        for states, ids, params in zip(
            rows, pooling_metadata.get_prompt_token_ids(), pooling_metadata.pooling_params, strict=True
        ):
            kept = states if not params.returned_token_ids else states[:, params.returned_token_ids]
            found.append(kept if params.step_tag_id is None else kept[ids == params.step_tag_id])
        return found


SEQUENCE_METHODS: dict[str, type[SequencePoolingMethod]] = {"CLS": CLSPool, "LAST": LastPool, "MEAN": MeanPool}
TOKEN_METHODS: dict[str, type[TokenPoolingMethod]] = {"ALL": AllPool, "STEP": StepPool}


def get_seq_pooling_method(pooling_type: str) -> SequencePoolingMethod:
    """The method of a `seq_pooling_type`."""
    return SEQUENCE_METHODS[pooling_type]()


def get_tok_pooling_method(pooling_type: str) -> TokenPoolingMethod:
    """The method of a `tok_pooling_type`."""
    return TOKEN_METHODS[pooling_type]()
