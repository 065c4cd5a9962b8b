"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hardpoint.types.logprobs import FlatLogprobs, Logprob, PromptLogprobs, SampleLogprobs

# JSON has no minus infinity; the same floor as vLLM's.
FLOOR = -9999.0


def finite(logprob: float) -> float:
    """A log-probability JSON can hold."""
    return max(logprob, FLOOR)


class CompletionLogprobsBuilder:
    """Builds /v1/completions' parallel lists, piece by piece, for one choice.

    The offset runs over the whole text of the choice, the echoed prompt included, so that
    `text[text_offset[i]:]` starts with `tokens[i]`: a token that shows in the text only in part,
    or not at all (a hidden special token, half a character), is listed with what shows.
    """

    def __init__(self, as_token_ids: bool) -> None:
        self._as_ids = as_token_ids
        self._offset = 0

    def build(
        self,
        token_ids: Sequence[int],
        positions: Iterable[Mapping[int, Logprob] | None],
        pieces: Iterable[str],
        text: str | None = None,
    ) -> dict[str, list[Any]]:
        """The lists for `token_ids`.

        positions  per token the candidates, the chosen one among them; None = not scored
        pieces     per token the text it adds
        text       the whole text these tokens make, where it is known; pieces are cut to fit it
        """
        begin = self._offset
        out: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, position, piece in zip(token_ids, positions, pieces, strict=True):
            shown = piece if text is None else _fitting(piece, text, self._offset - begin)
            out["text_offset"].append(self._offset)
            out["tokens"].append(f"token_id:{token_id}" if self._as_ids else shown)
            self._offset += len(shown)
            chosen = position.get(token_id) if position else None
            out["token_logprobs"].append(None if chosen is None else finite(chosen.logprob))
            out["top_logprobs"].append(self._candidates(position) if position else None)
        if text is not None:
            self._offset = begin + len(text)
        return out

    def _candidates(self, position: Mapping[int, Logprob]) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, entry in position.items():
            name = token_text(token_id, entry, self._as_ids)
            # Parts of characters can look alike: the likelier one keeps the name.
            named[name] = max(finite(entry.logprob), named.get(name, FLOOR))
        return named


def _fitting(piece: str, text: str, at: int) -> str:
    """As much of `piece` as `text` shows at position `at`."""
    if text.startswith(piece, at):
        return piece
    length = 0
    while length < len(piece) and at + length < len(text) and piece[length] == text[at + length]:
        length += 1
    return piece[:length]


def token_text(token_id: int, entry: Logprob, as_token_ids: bool) -> str:
    """How a candidate is named in an answer."""
    if as_token_ids or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


class ChatLogprobs:
    """Builds chat's `{"content": [...]}`.

    top  how many of the best candidates are listed; -1 = every one there is
    """

    def __init__(self, tokenizer: Any, top: int, as_token_ids: bool) -> None:
        self._bytes_of = getattr(tokenizer, "token_bytes", None)
        self._top = top
        self._as_ids = as_token_ids

    def build(self, token_ids: Sequence[int], logprobs: SampleLogprobs | FlatLogprobs) -> dict[str, Any]:
        """Per token its text, log-probability, bytes and best candidates."""
        return {"content": [self._token(token_id, logprobs[i]) for i, token_id in enumerate(token_ids)]}

    def _token(self, token_id: int, position: Mapping[int, Logprob]) -> dict[str, Any]:
        best = sorted(position.items(), key=lambda item: -item[1].logprob)
        entry = self._entry(token_id, position.get(token_id) or Logprob(FLOOR))
        entry["top_logprobs"] = [self._entry(*one) for one in (best if self._top < 0 else best[: self._top])]
        return entry

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        text = token_text(token_id, entry, self._as_ids)
        # The token's own bytes: a text may show U+FFFD where a token is half a character.
        if self._bytes_of is not None and not self._as_ids:
            raw = self._bytes_of(token_id)
        else:
            raw = text.encode("utf-8", errors="replace")
        return {"token": text, "logprob": finite(entry.logprob), "bytes": list(raw)}


def prompt_logprobs_body(positions: PromptLogprobs | FlatLogprobs | None) -> list[dict[int, Any] | None] | None:
    """`prompt_logprobs` as JSON: per prompt token id -> logprob, rank, text; null for the first."""
    if positions is None:
        return None
    return [
        {
            token_id: {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        if position
        else None
        for position in positions_of(positions)
    ]


def positions_of(logprobs: PromptLogprobs | FlatLogprobs | SampleLogprobs) -> list[Mapping[int, Logprob] | None]:
    """Either storage as a list of positions."""
    return [logprobs[i] for i in range(len(logprobs))]
