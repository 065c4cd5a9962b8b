"""What the sampler keeps about one request, worked out once when the request arrives."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hardpoint.types.sampling_params import SamplingParams, SamplingType
from hardpoint.worker.sampling.penalties import TokenCounts
from hardpoint.worker.sampling.randomness import seed_key


class RequestSampling:
    """One request's sampling parameters in the form the steps use.

    Everything that changes during a request is read from `output_token_ids`, the live list of its
    output so far: a request that is preempted, moved or cut back has no other state to lose.
    """

    __slots__ = (
        "_counts",
        "allowed_ids",
        "bad_words",
        "bias_ids",
        "bias_values",
        "constrained",
        "greedy",
        "min_p",
        "num_logprobs",
        "output_token_ids",
        "params",
        "penalised",
        "prompt_token_ids",
        "seed",
        "stop_ids",
        "top_k",
        "top_p",
        "vocab_size",
    )

    def __init__(
        self, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int], vocab_size: int
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids = output_token_ids
        self.vocab_size = vocab_size
        self.greedy = params.sampling_type is SamplingType.GREEDY
        self.seed = None if params.seed is None or self.greedy else seed_key(params.seed)
        self._take_filters(params, vocab_size)
        self._take_constraints(params, vocab_size)
        self.penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self._counts: TokenCounts | None = None
        self.constrained = self.penalised or any(
            given is not None for given in (self.bias_ids, self.allowed_ids, self.stop_ids, self.bad_words)
        )
        self.num_logprobs = _num_logprobs(params, vocab_size)

    def _take_filters(self, params: SamplingParams, vocab_size: int) -> None:
        self.top_k = vocab_size if self.greedy or params.top_k <= 0 else min(params.top_k, vocab_size)
        self.top_p = 1.0 if self.greedy else params.top_p
        self.min_p = 0.0 if self.greedy else params.min_p

    def _take_constraints(self, params: SamplingParams, vocab_size: int) -> None:
        bias = {token: value for token, value in (params.logit_bias or {}).items() if 0 <= token < vocab_size}
        self.bias_ids = np.fromiter(bias.keys(), np.int64) if bias else None
        self.bias_values = np.fromiter(bias.values(), np.float32) if bias else None
        self.allowed_ids: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = torch.from_numpy(_inside(params.allowed_token_ids, vocab_size))
        # Every id that can end the output, the model's own included.
        stops = _inside(params.all_stop_token_ids, vocab_size) if params.min_tokens else np.empty(0, np.int64)
        self.stop_ids = stops if stops.size else None
        words = [tuple(ids) for ids in params.bad_words_token_ids or () if ids and 0 <= ids[-1] < vocab_size]
        self.bad_words = words or None

    @property
    def filtered(self) -> bool:
        """Whether fewer tokens than all may be drawn."""
        return self.top_k < self.vocab_size or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def holds_stops(self) -> bool:
        """Whether `min_tokens` still forbids the tokens that end the output."""
        return self.stop_ids is not None and len(self.output_token_ids) < self.params.min_tokens

    def counts(self) -> TokenCounts:
        """How often each token occurred, brought up to date with the output."""
        if self._counts is None:
            # Only the repetition penalty looks at the prompt.
            prompt = self.prompt_token_ids if self.params.repetition_penalty != 1.0 else ()
            self._counts = TokenCounts(prompt, self.vocab_size)
        self._counts.follow(self.output_token_ids)
        return self._counts

    def output_was_cut(self) -> None:
        """Forget what was derived from output tokens that were taken back."""
        self._counts = None


def _inside(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({token for token in ids if 0 <= token < vocab_size}), np.int64)


def _num_logprobs(params: SamplingParams, vocab_size: int) -> int | None:
    """Columns of log-probabilities besides the chosen token's; None = not asked for."""
    number = params.num_logprobs
    if number is None:
        return None
    return vocab_size if number == -1 else min(number, vocab_size)
