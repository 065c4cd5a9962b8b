"""A generating model as an embedder or a classifier: its layers without the output head, and a pooler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import is_pooling_model
from hardpoint.worker.models.loading import PPMissingLayer
from hardpoint.worker.pooling.dense import sentence_projector
from hardpoint.worker.pooling.labels import num_labels_of
from hardpoint.worker.pooling.poolers import DispatchPooler

T = TypeVar("T", bound=type[nn.Module])
# Parts of a generating model that only make logits.
_HEADS = ("lm_head", "logits_processor")


class _WithoutHead(nn.Module):
    """Mixed in before a generating model's class; a subclass makes the pooler.

    A checkpoint may be of the layers alone, without the name that the whole model has before theirs.
    """

    is_pooling_model = True
    compute_logits = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **named: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **named)
        for name in _HEADS:
            if isinstance(getattr(self, name, None), nn.Module):
                setattr(self, name, PPMissingLayer())
        self._init_pooler(vllm_config)

    def _init_pooler(self, vllm_config: VllmConfig) -> None:
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load what is there for the layers; see the model's own."""
        loaded: set[str] | None = super().load_weights(self._renamed(weights))  # type: ignore[misc]
        if loaded is None:
            return None
        return loaded | {name for name, _ in self.named_parameters() if name.startswith("projector.")}

    def _renamed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        known = {name for name, _ in self.named_children()}
        for name, tensor in weights:
            first = name.partition(".")[0]
            if first in _HEADS:
                continue
            bare = first not in known and first != "model" and "model" in known
            yield (f"model.{name}" if bare else name), tensor


def _settings(vllm_config: VllmConfig) -> Any:
    config = vllm_config.model_config.pooler_config
    assert config is not None, "pooling models have pooling settings"
    return config


class _Embedder(_WithoutHead):
    """Embeds sequences and tokens."""

    def _init_pooler(self, vllm_config: VllmConfig) -> None:
        self.projector = sentence_projector(vllm_config.model_config)
        self.pooler = DispatchPooler.for_embedding(_settings(vllm_config), self.projector)


class _Classifier(_WithoutHead):
    """Classifies sequences and tokens with one linear layer."""

    def _init_pooler(self, vllm_config: VllmConfig) -> None:
        config = vllm_config.model_config.hf_text_config
        self.score = nn.Linear(config.hidden_size, num_labels_of(vllm_config.model_config.hf_config), bias=False)
        self.pooler = DispatchPooler.for_seq_cls(_settings(vllm_config), classifier=self.score)


def as_embedding_model(cls: T) -> T:
    """The class as an embedder; one that pools already stays what it is."""
    return cls if is_pooling_model(cls) else _adapted(cls, _Embedder, "ForEmbedding")


def as_seq_cls_model(cls: T) -> T:
    """The class as a classifier of sequences; one that pools already stays what it is."""
    return cls if is_pooling_model(cls) else _adapted(cls, _Classifier, "ForSequenceClassification")


def _adapted(cls: T, adapter: type[nn.Module], ending: str) -> T:
    stem = cls.__name__
    for known in ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"):
        stem = stem.removesuffix(known)
    facts = {"__module__": __name__, "__doc__": f"{cls.__name__}: {adapter.__doc__}"}
    return type(stem + ending, (adapter, cls), facts)  # type: ignore[return-value]


def converted(cls: T, convert_type: str) -> T:
    """The class as `--convert` asks: `none`, `embed` or `classify`."""
    if convert_type == "embed":
        return as_embedding_model(cls)
    return as_seq_cls_model(cls) if convert_type == "classify" else cls
