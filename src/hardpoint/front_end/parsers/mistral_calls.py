"""Mistral's calls: a list of objects behind one mark, or a name and arguments behind a mark each."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from hardpoint.front_end.parsers.calls import Body, Reading, Sink
from hardpoint.front_end.parsers.json_calls import JsonCalls, NamedCalls
from hardpoint.front_end.parsers.json_text import WHITESPACE

_ALPHABET = string.ascii_letters + string.digits
_LIST = JsonCalls()
_NAMED = NamedCalls(name_end=("[CALL_ID]", "[ARGS]", "{"), between="[ARGS]")


def new_mistral_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralBody(Body):
    """Reads one part: which of the two it is, its first character tells."""

    def __init__(self, sink: Sink, tools: Sequence[object], mark: str) -> None:
        super().__init__(sink, tools)
        sink.new_id = new_mistral_id
        self._inner: Body | None = None
        self._mark = mark

    def feed(self, text: str) -> tuple[Reading, int]:
        """As the reader of the form that was found."""
        if self._inner is None:
            begins = text.lstrip(WHITESPACE)
            if not begins:
                return Reading.MORE, 0
            form = _LIST if begins[0] in "[{" else _NAMED
            self._inner = form(self.sink, self.tools, self._mark)
        reading, used = self._inner.feed(text)
        self.in_arguments = self._inner.in_arguments
        return reading, used

    def close(self, text: str) -> bool:
        """As the reader of the form that was found."""
        return self._inner is not None and self._inner.close(text)
