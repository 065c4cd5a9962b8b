"""Scores of pairs of texts: what is run for them, and how answers become scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardpoint.config.sections import ModelConfig
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.pooling import SECOND_TEXT
from hardpoint.types.outputs import PoolingRequestOutput
from hardpoint.types.pooling_params import PoolingParams

CROSS, BI, LATE = "cross-encoder", "bi-encoder", "late-interaction"


def how_to_score(model: ModelConfig, tasks: Sequence[str]) -> str:
    """How this model compares two texts. Raises VLLMValidationError when it cannot."""
    if model.score_type == CROSS and "classify" in tasks:
        labels = _num_labels(model.hf_config)
        if labels != 1:
            raise VLLMValidationError(
                f"the model has {labels} classes; a score needs a model with one (num_labels 1)", parameter="model"
            )
        return CROSS
    if model.score_type == LATE and "token_embed" in tasks:
        return LATE
    if "embed" in tasks:
        return BI
    if "token_embed" in tasks:
        return LATE
    raise VLLMValidationError(f"the model cannot score: it supports {', '.join(tasks) or 'nothing'}", parameter="model")


def _num_labels(config: Any) -> int:
    stated = getattr(config, "num_labels", None)
    return stated if isinstance(stated, int) else len(getattr(config, "id2label", None) or (0, 1))


@dataclass
class Pairing:
    """Texts to compare, one query for all documents or one for each.

    Raises VLLMValidationError when their numbers do not fit.
    """

    queries: list[Any]
    documents: list[Any]

    def __post_init__(self) -> None:
        if not self.queries or not self.documents:
            raise VLLMValidationError("a score needs at least one text on each side", parameter="data_2")
        if len(self.queries) not in (1, len(self.documents)):
            raise VLLMValidationError(
                f"{len(self.queries)} texts cannot be compared with {len(self.documents)}: give one, or one for each",
                parameter="data_1",
            )

    def pairs(self) -> list[tuple[Any, Any]]:
        """Query and document of each score."""
        queries = self.queries if len(self.queries) > 1 else self.queries * len(self.documents)
        return list(zip(queries, self.documents, strict=True))


def pair_prompt(tokenizer: Any, query: str, document: str, limit: int, cut: int | None) -> tuple[list[int], int | None]:
    """Ids of two texts read together, and where the second begins if the model tells them apart.

    limit  tokens of the model's context
    cut    keep so many tokens, from the end of the longer text; -1 = the context
    """
    if tokenizer is None:
        raise VLLMValidationError("the server runs without a tokenizer: texts cannot be scored", parameter="data_1")
    most = None if cut is None else limit if cut == -1 else min(cut, limit)
    ids, types = tokenizer.encode_pair(query, document, most)
    return ids, types.index(1) if 1 in types else None


def pair_params(params: PoolingParams, second: int | None) -> PoolingParams:
    """The parameters of one pair of a cross-encoder."""
    params = params.clone()
    params.task = "classify"
    if second is not None:
        params.extra_kwargs = {**(params.extra_kwargs or {}), SECOND_TEXT: second}
    return params


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / length if length else 0.0


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """For each token of the query the best product with one of the document, summed."""
    return float((query @ document.T).max(axis=1).sum())


def compare(how: str, query: PoolingRequestOutput[Any], document: PoolingRequestOutput[Any]) -> float:
    """The score of two texts from their own answers."""
    return (cosine if how == BI else max_sim)(query.outputs.array, document.outputs.array)
