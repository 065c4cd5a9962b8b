"""One output's tokens and text as they grow: detokenisation, stop strings, what may be shown yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.front_end.stop_strings import StopMatcher
from hardpoint.front_end.tokenizers.detokenizer import IncrementalDetokenizer, detokenizer_for
from hardpoint.types.sampling_params import SamplingParams


class OutputText:
    """The tokens and the text generated so far for one output.

    token_ids  every token that counts, the one that completed a stop string included
    text       their text, cut at a stop string
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop or ())
        self._watches = bool(params.stop)
        self._ended = False
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = detokenizer_for(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def add(self, token_ids: Sequence[int], *, hide_last: bool = False) -> str | None:
        """Add a step's tokens; return the stop string they complete, if any.

        Tokens after the one that completes it are dropped. `hide_last` keeps the last token's
        text out: it is an end token, not part of the answer.
        """
        for place, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if self._detokenizer is None or (hide_last and place == len(token_ids) - 1):
                continue
            stop = self._extend(self._detokenizer.push(token_id))
            if stop is not None:
                return stop
        return None

    def end(self) -> str | None:
        """No more tokens come: show what was held back; return a stop string this completes."""
        stop = None
        if self._detokenizer is not None and not self._ended:
            stop = self._extend(self._detokenizer.finish())
        self._ended = True
        return stop

    @property
    def waits(self) -> bool:
        """Whether text is held back that the next tokens will decide about."""
        if self._ended or self._detokenizer is None:
            return False
        return self._detokenizer.holds_back or bool(self._held_back)

    @property
    def visible(self) -> int:
        """How many characters of `text` may be shown; never less than before."""
        return len(self.text) - (0 if self._ended else self._held_back)

    @property
    def _held_back(self) -> int:
        # With the stop string in the output, everything before its end is shown anyway.
        return 0 if self._include_stop else self._matcher.pending

    def _extend(self, piece: str) -> str | None:
        if not self._watches or not piece:
            self.text += piece
            return None
        match = self._matcher.feed(piece, active=len(self.token_ids) > self._min_tokens)
        if match is None:
            self.text += piece
            return None
        self.text += piece[: match.end]
        if not self._include_stop:
            self.text = self.text[: len(self.text) - len(match.stop)]
        self._ended = True
        return match.stop
