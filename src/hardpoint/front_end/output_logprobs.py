"""Log-probabilities as users see them: per position a mapping from token to value, rank and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hardpoint.front_end.tokenizers.detokenizer import IncrementalDetokenizer, detokenizer_for
from hardpoint.types.logprobs import FlatLogprobs, Logprob, LogprobsLists, LogprobsOnePosition, PromptLogprobs
from hardpoint.types.sampling_params import SamplingParams

Positions = FlatLogprobs | list[LogprobsOnePosition]


class LogprobsCollector:
    """Gathers the log-probabilities of one output and of its prompt.

    A token's text is what it adds after the tokens before it, so that the texts of chosen tokens,
    joined, are the output's text: a token that ends in the middle of a character has the
    characters before, the token that completes it has the whole character.

    positions         one entry per output token; None unless asked for
    prompt_positions  one entry per prompt token, the first None; None unless asked for
    cumulative        sum of the chosen tokens' log-probabilities; None unless asked for
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer if params.detokenize else None
        self._params = params
        self._flat = params.flat_logprobs
        self._prompt = prompt_token_ids
        self.positions: Positions | None = None
        self.prompt_positions: FlatLogprobs | PromptLogprobs | None = None
        self.cumulative: float | None = None
        if params.num_logprobs is not None:
            self.positions = FlatLogprobs() if self._flat else []
            self.cumulative = 0.0
            self._stream = self._new_stream(prompt_token_ids)
        if params.prompt_logprobs is not None:
            self.prompt_positions = FlatLogprobs() if self._flat else []
            self._prompt_stream = self._new_stream(())
            self._pass_first_prompt_token()

    def _new_stream(self, continues: Sequence[int]) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        return detokenizer_for(self._tokenizer, continues, skip_special_tokens=self._params.skip_special_tokens)

    def _pass_first_prompt_token(self) -> None:
        assert self.prompt_positions is not None
        # Nothing comes before the first token that could predict it.
        self.prompt_positions.append(None)
        if self._prompt_stream is not None and self._prompt:
            self._prompt_stream.push(self._prompt[0])

    def add(self, rows: LogprobsLists | None, count: int) -> None:
        """Add the first `count` rows of a step, one per output token that counts."""
        if rows is None or self.positions is None or self.cumulative is None:
            return
        # Ids asked for by name come in the order asked, not by rank.
        by_rank = not self._params.logprob_token_ids
        for row in range(min(count, len(rows.sampled_token_ranks))):
            self.cumulative += float(rows.logprobs[row][0])
            _append(self.positions, rows, row, cast("int", self._params.num_logprobs), by_rank, self._stream)

    def add_prompt(self, rows: LogprobsLists | None) -> None:
        """Add rows for the next prompt tokens, from the second one on."""
        if rows is None or self.prompt_positions is None:
            return
        limit = cast("int", self._params.prompt_logprobs)
        for row in range(len(rows.sampled_token_ranks)):
            _append(self.prompt_positions, rows, row, limit, True, self._prompt_stream)

    def take_prompt(self) -> FlatLogprobs | PromptLogprobs | None:
        """What `prompt_positions` has; afterwards it is empty, for outputs that say things once."""
        taken, self.prompt_positions = self.prompt_positions, None
        return taken


def _append(
    positions: Any,
    rows: LogprobsLists,
    row: int,
    limit: int,
    by_rank: bool,
    stream: IncrementalDetokenizer | None,
) -> None:
    """Add one position: the chosen token, then the `limit` best (-1 = all the row has)."""
    width = rows.logprob_token_ids.shape[1] if limit == -1 else limit + 1
    token_ids = rows.logprob_token_ids[row][:width].tolist()
    logprobs = rows.logprobs[row][:width].tolist()
    ranks: list[int | None] = [int(rows.sampled_token_ranks[row])]
    ranks.extend(range(1, len(token_ids)) if by_rank else [None] * (len(token_ids) - 1))
    texts: list[str | None] = [None] * len(token_ids)
    if stream is not None:
        texts = [stream.peek(token_id) for token_id in token_ids]
        stream.push(token_ids[0])
    if isinstance(positions, FlatLogprobs):
        positions.append_fast(*_without_repeat(token_ids, logprobs, ranks, texts))
    else:
        entries = zip(token_ids, logprobs, ranks, texts, strict=True)
        positions.append({token: Logprob(value, rank, text) for token, value, rank, text in entries})


def _without_repeat(token_ids: list[int], *columns: list[Any]) -> list[list[Any]]:
    """Columns without the chosen token's second entry, which it has when it is among the best."""
    if token_ids[0] not in token_ids[1:]:
        return [token_ids, *columns]
    again = token_ids.index(token_ids[0], 1)
    return [[*column[:again], *column[again + 1 :]] for column in (token_ids, *columns)]
