"""Poolers: from the hidden states of a step to one result per request, by task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hardpoint.config.current import get_current_vllm_config_or_none
from hardpoint.config.sections import PoolerConfig
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.worker.pooling.activations import PoolerNormalize, classifier_activation
from hardpoint.worker.pooling.metadata import PoolingMetadata
from hardpoint.worker.pooling.methods import (
    SequencePoolingMethod,
    TokenPoolingMethod,
    get_seq_pooling_method,
    get_tok_pooling_method,
)

PoolerOutput = list[Tensor | None]
ProjectorFn = Callable[[Tensor], Tensor]
ClassifierFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PoolingParamsUpdate:
    """What a pooler wants changed in a request's parameters.

    requires_token_ids  the pooler reads the prompt's ids
    """

    requires_token_ids: bool = False

    def __or__(self, other: PoolingParamsUpdate) -> PoolingParamsUpdate:
        """What either wants."""
        return PoolingParamsUpdate(self.requires_token_ids or other.requires_token_ids)

    def apply(self, params: PoolingParams) -> None:
        """Write it down."""
        params.requires_token_ids = self.requires_token_ids


class Pooler(nn.Module, ABC):
    """Turns hidden states into results.

    Built   with the model, as its attribute `pooler`.
    Called  once per step with the rows of the requests whose prompts are complete in it.
    Fault   what it raises ends the requests it raises for when each is tried alone.
    """

    @abstractmethod
    def get_supported_tasks(self) -> Set[str]:
        """The pooling tasks it answers."""

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        """What it wants of requests of a task."""
        return PoolingParamsUpdate()

    @abstractmethod
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> Any:
        """[rows, hidden] -> a tensor per request: a list, or one tensor whose rows they are."""


class EmbeddingPoolerHead(nn.Module):
    """From a vector to an embedding: a projection, the first dimensions, length one."""

    def __init__(
        self,
        projector: ProjectorFn | None = None,
        head_dtype: torch.dtype | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.projector = projector
        self.head_dtype = head_dtype
        self.activation = activation

    def forward(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """[..., hidden] -> [..., dimensions]."""
        if self.head_dtype is not None:
            pooled = pooled.to(self.head_dtype)
        if self.projector is not None:
            pooled = self.projector(pooled)
        if params.dimensions is not None:
            pooled = pooled[..., : params.dimensions]
        if self.activation is not None and params.use_activation is not False:
            pooled = self.activation(pooled)
        return pooled


class ClassifierPoolerHead(nn.Module):
    """From a vector to labels: a classifier, its calibration, a function over the labels."""

    def __init__(
        self,
        classifier: ClassifierFn | None = None,
        logit_mean: float | None = None,
        logit_sigma: float | None = None,
        head_dtype: torch.dtype | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.classifier = classifier
        self.logit_mean, self.logit_sigma = logit_mean, logit_sigma
        self.head_dtype = head_dtype
        self.activation = activation

    def forward(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """[..., hidden] -> [..., labels]."""
        if self.classifier is not None:
            pooled = self.classifier(pooled)
        if self.head_dtype is not None:
            pooled = pooled.to(self.head_dtype)
        if self.logit_mean is not None:
            pooled = pooled - self.logit_mean
        if self.logit_sigma is not None:
            pooled = pooled / self.logit_sigma
        if self.activation is not None and params.use_activation is not False:
            pooled = self.activation(pooled)
        return pooled


class SequencePooler(Pooler):
    """One vector per request, and a head over it."""

    def __init__(self, pooling: SequencePoolingMethod, head: nn.Module, tasks: Set[str] = frozenset({"embed"})) -> None:
        super().__init__()
        self.pooling, self.head, self._tasks = pooling, head, frozenset(tasks)

    def get_supported_tasks(self) -> Set[str]:
        """Those it was made for."""
        return self._tasks

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """[rows, hidden] -> [width] for each request."""
        pooled = self.pooling(hidden_states, pooling_metadata)
        return [self.head(row, params) for row, params in zip(pooled, pooling_metadata.pooling_params, strict=True)]


class TokenPooler(Pooler):
    """All vectors of a request, and a head over each."""

    def __init__(
        self, pooling: TokenPoolingMethod, head: nn.Module | None, tasks: Set[str], requires_token_ids: bool = False
    ) -> None:
        super().__init__()
        self.pooling, self.head, self._tasks = pooling, head, frozenset(tasks)
        self._requires_token_ids = requires_token_ids

    def get_supported_tasks(self) -> Set[str]:
        """Those it was made for."""
        return self._tasks

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        """Token ids where rows are chosen by them."""
        return PoolingParamsUpdate(requires_token_ids=self._requires_token_ids)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """[rows, hidden] -> [tokens, width] for each request."""
        pooled = self.pooling(hidden_states, pooling_metadata)
        if self.head is None:
            return list(pooled)
        return [self.head(rows, params) for rows, params in zip(pooled, pooling_metadata.pooling_params, strict=True)]


class IdentityPooler(Pooler):
    """The hidden states as they are, for what a plugin makes of them."""

    def get_supported_tasks(self) -> Set[str]:
        """Only a plugin's."""
        return {"plugin"}

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """[rows, hidden] -> [tokens, hidden] for each request."""
        return [hidden_states[start:end] for start, end in pooling_metadata.get_pooling_cursor().spans]


class DispatchPooler(Pooler):
    """Hands each request to the pooler of its task."""

    def __init__(self, poolers_by_task: Mapping[str, Pooler]) -> None:
        super().__init__()
        for task, pooler in poolers_by_task.items():
            if task not in pooler.get_supported_tasks():
                raise ValueError(f"the pooler given for {task!r} answers {sorted(pooler.get_supported_tasks())}")
        self.poolers_by_task = dict(poolers_by_task)
        self._modules_of_poolers = nn.ModuleList(poolers_by_task.values())

    @classmethod
    def for_embedding(cls, pooler_config: PoolerConfig, projector: ProjectorFn | None = None) -> DispatchPooler:
        """A model that embeds sequences and tokens."""
        return cls(
            {
                "token_embed": pooler_for_token_embed(pooler_config, projector),
                "embed": pooler_for_embed(pooler_config, projector),
            }
        )

    @classmethod
    def for_seq_cls(
        cls,
        pooler_config: PoolerConfig,
        *,
        pooling: SequencePoolingMethod | None = None,
        classifier: ClassifierFn | None = None,
        act_fn: nn.Module | str | None = None,
    ) -> DispatchPooler:
        """A model that classifies sequences and tokens; `pooling` says how a sequence becomes a vector."""
        return cls(
            {
                "token_classify": pooler_for_token_classify(pooler_config, classifier=classifier, act_fn=act_fn),
                "classify": pooler_for_classify(pooler_config, pooling=pooling, classifier=classifier, act_fn=act_fn),
            }
        )

    def get_supported_tasks(self) -> Set[str]:
        """All of its poolers'."""
        return set(self.poolers_by_task)

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        """What the pooler of the task wants."""
        return self.poolers_by_task[task].get_pooling_updates(task)

    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """The results in the order of the requests."""
        outputs: PoolerOutput = []
        start = 0
        for task, group in groupby(pooling_metadata.tasks):
            end = start + len(list(group))
            pooler = self.poolers_by_task.get(task)
            if pooler is None:
                raise ValueError(f"unsupported task {task!r}; supported: {', '.join(sorted(self.poolers_by_task))}")
            outputs.extend(pooler(hidden_states, pooling_metadata[start:end]))
            start = end
        return outputs

    def extra_repr(self) -> str:
        """The tasks, for printing the model."""
        return f"tasks={sorted(self.poolers_by_task)}"


def pooler_for_embed(pooler_config: PoolerConfig, projector: ProjectorFn | None = None) -> Pooler:
    """One embedding per request."""
    pooling = get_seq_pooling_method(pooler_config.seq_pooling_type or "LAST")
    return SequencePooler(pooling, _embedding_head(projector), {"embed"})


def pooler_for_token_embed(pooler_config: PoolerConfig, projector: ProjectorFn | None = None) -> Pooler:
    """One embedding per token."""
    kind = pooler_config.tok_pooling_type or "ALL"
    return TokenPooler(get_tok_pooling_method(kind), _embedding_head(projector), {"token_embed"}, kind == "STEP")


def pooler_for_classify(
    pooler_config: PoolerConfig,
    *,
    pooling: SequencePoolingMethod | None = None,
    classifier: ClassifierFn | None = None,
    act_fn: nn.Module | str | None = None,
) -> Pooler:
    """The labels of each request."""
    pooling = pooling or get_seq_pooling_method(pooler_config.seq_pooling_type or "LAST")
    return SequencePooler(pooling, _classifier_head(pooler_config, classifier, act_fn), {"classify"})


def pooler_for_token_classify(
    pooler_config: PoolerConfig,
    *,
    pooling: TokenPoolingMethod | None = None,
    classifier: ClassifierFn | None = None,
    act_fn: nn.Module | str | None = None,
) -> Pooler:
    """The labels of each token."""
    kind = pooler_config.tok_pooling_type or "ALL"
    head = _classifier_head(pooler_config, classifier, act_fn)
    return TokenPooler(pooling or get_tok_pooling_method(kind), head, {"token_classify"}, kind == "STEP")


def _embedding_head(projector: ProjectorFn | None) -> nn.Module:
    return EmbeddingPoolerHead(projector, torch.float32, PoolerNormalize())


def _classifier_head(
    pooler_config: PoolerConfig, classifier: ClassifierFn | None, act_fn: nn.Module | str | None
) -> nn.Module:
    if act_fn is None or isinstance(act_fn, str):
        config = get_current_vllm_config_or_none()
        act_fn = classifier_activation(config.model_config.hf_config if config is not None else None)
    return ClassifierPoolerHead(classifier, pooler_config.logit_mean, pooler_config.logit_sigma, torch.float32, act_fn)
