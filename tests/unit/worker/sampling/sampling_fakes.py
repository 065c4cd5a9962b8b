"""Rows for the sampler without a worker, and a plain reference of what may be drawn."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint.contracts.logits_processor import LiveOutput
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.sampling.metadata import SamplingMetadata, build_metadata
from hardpoint.worker.sampling.request import RequestSampling

VOCAB = 97
CPU = torch.device("cpu")


def request(prompt=(1, 2, 3), output=(), *, eos=None, bad_words=None, vocab=VOCAB, **params) -> RequestSampling:
    made = SamplingParams(**params)
    if eos is not None:
        made.update_from_generation_config({}, eos)
    if bad_words is not None:
        made._bad_words_token_ids = bad_words
    return RequestSampling(made, list(prompt), LiveOutput(output), vocab)


def metadata(*requests: RequestSampling, **more) -> SamplingMetadata:
    return build_metadata(list(requests), CPU, **more)


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def reference_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """What may be drawn and how often, by the definitions, token by token in float64."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0.0
    total, before = weights.sum(), 0.0
    for token in order:
        weight = weights[token]
        if before >= top_p * total:
            weights[token] = 0.0
        before += weight
    return weights / weights.sum()
