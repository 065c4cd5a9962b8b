"""From logits to tokens: rules, custom processors, temperature, filters, the draw, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from hardpoint.types.logprobs import LogprobsTensors
from hardpoint.types.schedule import NO_TOKEN_LEFT
from hardpoint.worker.kernels.library import kernels
from hardpoint.worker.sampling.constraints import apply_allowed_ids, apply_bad_words, apply_min_tokens
from hardpoint.worker.sampling.draw import best_tokens, draw_filtered, draw_tokens, keep_filtered, race_tokens
from hardpoint.worker.sampling.drawing import NAN, RowDraws, draws_of
from hardpoint.worker.sampling.logprobs import gather_logprobs, spread_rows
from hardpoint.worker.sampling.metadata import Draw, SamplingMetadata
from hardpoint.worker.sampling.penalties import apply_penalties
from hardpoint.worker.sampling.randomness import seeded_streams

_NAN = "the model produced NaN logits"


@dataclass
class SamplerOutput:
    """The tokens of a step.

    sampled_token_ids  [rows, 1] int64
    logprobs_tensors   one row per token, zeros where nobody asked; None when nobody did
    faults             row -> why its token is worthless
    """

    sampled_token_ids: Tensor
    logprobs_tensors: LogprobsTensors | None
    faults: dict[int, str] = field(default_factory=dict)


class Sampler(nn.Module):
    """Chooses one token per row of logits.

    logprobs_mode  raw_logprobs, raw_logits (as the model gave them), processed_logprobs or
                   processed_logits (after every rule and filter)
    seed           of the generator that requests without a seed of their own share
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs", seed: int = 0) -> None:
        super().__init__()
        self.logprobs_mode = logprobs_mode
        self._generator = np.random.default_rng(seed & ((1 << 64) - 1))
        self._library = kernels()

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token per row; `logits` [rows, vocab] may be changed in place.

        Raises ProcessorFault when a custom processor raises.
        """
        logits = logits.to(torch.float32)
        faults: dict[int, str] = {}
        if self._is_plain(sampling_metadata):
            draws = draws_of(sampling_metadata, logits, self._library)
            if draws is not None:
                return SamplerOutput(self._drawn(draws, logits, faults).unsqueeze(-1), None, faults)
        self._set_faulty_aside(logits, faults)
        scores = self._raw_scores(logits, sampling_metadata)
        changed = self.apply_logits_processors(logits, sampling_metadata)
        if changed is not None:
            logits = changed
            self._set_faulty_aside(logits, faults)
        sampled, processed = self.sample(logits, sampling_metadata, faults)
        if scores is None:
            scores = processed
        return SamplerOutput(sampled.unsqueeze(-1), self._logprobs(scores, sampled, sampling_metadata), faults)

    @staticmethod
    def _is_plain(metadata: SamplingMetadata) -> bool:
        """Whether nothing is done with the logits but draw from them."""
        return metadata.max_num_logprobs is None and not metadata.constrained and metadata.logitsprocs is None

    def _drawn(self, draws: RowDraws, logits: Tensor, faults: dict[int, str]) -> Tensor:
        """Draw in the kernels [rows]; notes rows that have no token, whose place holds 0."""
        tokens = draws.choose(logits, self._generator.random)
        if tokens.min() < 0:
            for row in np.flatnonzero(tokens < 0).tolist():
                faults.setdefault(row, _NAN if tokens[row] == NAN else NO_TOKEN_LEFT)
            tokens = tokens.clip(min=0)
        return torch.from_numpy(tokens)

    @staticmethod
    def _set_faulty_aside(logits: Tensor, faults: dict[int, str]) -> None:
        """Note rows without a finite best logit and level them, so that nothing later trips over them."""
        best = logits.amax(-1).cpu().numpy()
        if np.isfinite(best).all():
            return
        for row in np.flatnonzero(~np.isfinite(best)).tolist():
            if best[row] == np.inf:
                # A processor's way of saying "this one".
                logits[row] = torch.where(logits[row] == torch.inf, 0.0, -torch.inf)
            else:
                faults.setdefault(row, _NAN if np.isnan(best[row]) else NO_TOKEN_LEFT)
                logits[row] = 0.0

    def _raw_scores(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor | None:
        """The logits that raw log-probabilities are taken from, kept before they change."""
        if metadata.max_num_logprobs is None or not self.logprobs_mode.startswith("raw"):
            return None
        if len(metadata.logprob_rows) < metadata.num_rows:
            return logits[metadata.logprob_rows]
        changes = metadata.constrained or not metadata.all_greedy or metadata.logitsprocs is not None
        return logits.clone() if changes else logits

    @staticmethod
    def apply_logits_processors(logits: Tensor, metadata: SamplingMetadata) -> Tensor | None:
        """Apply the rules and the custom processors; None when there was nothing to apply."""
        custom = metadata.logitsprocs
        uses_custom = custom is not None and custom.applies(metadata)
        if not metadata.constrained and not uses_custom:
            return None
        if metadata.bias is not None:
            metadata.bias.apply(logits)
        if metadata.penalised:
            apply_penalties(logits, metadata.penalised)
        if metadata.bad_words:
            apply_bad_words(logits, metadata.bad_words)
        if metadata.min_tokens:
            apply_min_tokens(logits, metadata.min_tokens)
        if metadata.allowed:
            apply_allowed_ids(logits, metadata.allowed)
        return custom.apply(logits, metadata) if custom is not None and uses_custom else logits

    def sample(
        self, logits: Tensor, metadata: SamplingMetadata, faults: dict[int, str]
    ) -> tuple[Tensor, Tensor | None]:
        """Choose by temperature and filters.

        Returns the tokens [rows] and, in a processed log-probability mode, the final logits of the rows
        that asked for log-probabilities.
        """
        if metadata.all_greedy:
            return best_tokens(logits), self._asked(logits, metadata)
        draws = None if self._has_late_processors(metadata) else draws_of(metadata, logits, self._library)
        if draws is not None:
            return self._drawn(draws, logits, faults), self._asked(logits, metadata, metadata.temperature)
        sampled = torch.empty(metadata.num_rows, dtype=torch.int64, device=logits.device)
        if not metadata.all_random:
            sampled[metadata.greedy_rows] = best_tokens(logits[metadata.greedy_rows])
        assert metadata.temperature is not None
        custom = metadata.logitsprocs
        if custom is not None and self._has_late_processors(metadata):
            logits = custom.apply_argmax_invariant(logits / metadata.temperature.unsqueeze(-1), metadata)
            self._set_faulty_aside(logits, faults)
            temperature = torch.ones_like(metadata.temperature)
        else:
            temperature = metadata.temperature
        sampled[metadata.random_rows] = self._draw(logits, temperature, metadata)
        return sampled, self._asked(logits, metadata, temperature)

    @staticmethod
    def _has_late_processors(metadata: SamplingMetadata) -> bool:
        return metadata.logitsprocs is not None and metadata.logitsprocs.has_argmax_invariant

    def _draw(self, logits: Tensor, temperature: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Draw for the random rows; returns [random rows]."""
        rows = metadata.random_rows
        if not metadata.all_random:
            logits, temperature = logits[rows], temperature[rows]
        weights = logits - logits.amax(-1, keepdim=True)
        weights.mul_(temperature.reciprocal().unsqueeze(-1)).exp_()
        drawn = torch.empty_like(rows)
        for draw in metadata.draws:
            part = weights if len(metadata.draws) == 1 else weights[draw.places]
            drawn[draw.places] = self._draw_alike(part, draw, metadata)
        return drawn

    def _draw_alike(self, weights: Tensor, draw: Draw, metadata: SamplingMetadata) -> Tensor:
        numbers = self._numbers(draw).to(weights.device)
        if not draw.filtered:
            return race_tokens(weights, numbers) if draw.seeded else draw_tokens(weights, numbers)
        assert metadata.top_k is not None
        assert metadata.top_p is not None
        assert metadata.min_p is not None
        filters = metadata.top_k[draw.rows], metadata.top_p[draw.rows], metadata.min_p[draw.rows]
        return draw_filtered(weights, *filters, numbers, seeded=bool(draw.seeded))

    def _numbers(self, draw: Draw) -> Tensor:
        """One uniform number per row, or the rows' streams; these take nothing from the shared generator."""
        if not draw.seeded:
            return torch.from_numpy(self._generator.random(draw.rows.numel()))
        positions = np.array([len(request.output_token_ids) for request in draw.seeded])
        return seeded_streams(draw.keys, positions)

    def _asked(self, logits: Tensor, metadata: SamplingMetadata, temperature: Tensor | None = None) -> Tensor | None:
        """The final logits of the rows that want processed log-probabilities."""
        if metadata.max_num_logprobs is None or self.logprobs_mode.startswith("raw"):
            return None
        rows = torch.tensor(metadata.logprob_rows, device=logits.device)
        final = logits[rows]
        if temperature is not None:
            final = final / temperature[rows].unsqueeze(-1)
        if metadata.top_k is not None and metadata.top_p is not None and metadata.min_p is not None:
            final = keep_filtered(final, metadata.top_k[rows], metadata.top_p[rows], metadata.min_p[rows])
        return final

    def _logprobs(self, scores: Tensor | None, sampled: Tensor, metadata: SamplingMetadata) -> LogprobsTensors | None:
        if scores is None or metadata.max_num_logprobs is None:
            return None
        rows = metadata.logprob_rows
        part = gather_logprobs(
            scores,
            sampled if len(rows) == metadata.num_rows else sampled[rows],
            metadata.max_num_logprobs,
            as_logits=self.logprobs_mode.endswith("logits"),
            asked_ids=[metadata.requests[row].params.logprob_token_ids or None for row in rows],
        )
        return spread_rows(part, rows, metadata.num_rows)
