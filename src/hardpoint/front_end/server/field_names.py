"""What the API that was called calls a field: refusals come from below, where every request is a chat or a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pydantic

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.errors import MAX_LISTED_PROBLEMS, line_of, problems_of


class Place(NamedTuple):
    """Where a chat message stands in the request that it was made of.

    path   of the message, or of what became one
    parts  of its content's parts, where the content is a list
    """

    path: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class FieldNames:
    """Names of one request's fields.

    names     what is said below -> what the client calls it, `*` for a number; a name that is not there is the
              client's own
    messages  where the messages of the chat come from; None = they are the client's
    """

    names: Mapping[str, str] = field(default_factory=dict)
    messages: Sequence[Place] | None = None

    def also(self, names: Mapping[str, str]) -> FieldNames:
        """With more names, which are said further below: what they lead to may have a name here again."""
        return replace(self, names={**self.names, **{low: self.names.get(ours, ours) for low, ours in names.items()}})

    def path(self, place: str) -> str:
        """A field's path as the client knows it."""
        for low, ours in self.names.items():
            if "*" in low:
                # More specific names stand before those that they begin with.
                pattern = r"(\d+)".join(map(re.escape, low.split("*")))
                place = re.sub(rf"^{pattern}(?=\.|$)", ours.replace("*", r"\1"), place)
        root, _, rest = place.partition(".")
        number, _, inside = rest.partition(".")
        if root == "messages" and self.messages is not None and number.isdecimal():
            return self._in_message(int(number), inside)
        return self.names.get(place) or ".".join([self.names.get(root, root), *([rest] if rest else [])])

    def _in_message(self, number: int, inside: str) -> str:
        assert self.messages is not None
        if number >= len(self.messages):
            return self.names.get("messages", "messages")
        place = self.messages[number]
        content, _, part = inside.partition(".")
        which, _, rest = part.partition(".")
        if content == "content" and which.isdecimal() and int(which) < len(place.parts):
            return ".".join([place.parts[int(which)], *([rest] if rest else [])])
        return place.path

    def text(self, message: str, place: str | None) -> str:
        """A message with the client's names. A common word is one only in what is said of that very field."""
        for low, ours in self.names.items():
            if low != ours and ("_" in low or low == (place or "").partition(".")[0]) and low != "prompt":
                message = re.sub(rf"(?<![\w.]){re.escape(low)}(?![\w])", ours.replace("\\", r"\\"), message)
        return message

    @contextmanager
    def told(self) -> Iterator[None]:
        """Let what the block refuses be told in these names."""
        try:
            yield
        except VLLMValidationError as error:
            place = error.parameter
            if place is None:
                raise
            path, text = self.path(place), self.text(str(error), place)
            if (path, text) == (place, str(error)):
                raise
            raise VLLMValidationError(text, parameter=path, value=error.value) from None
        except pydantic.ValidationError as error:
            raise self._of_problems(error) from None

    def _of_problems(self, error: pydantic.ValidationError) -> VLLMValidationError:
        lines, first = [], None
        for place, reason in problems_of(error)[:MAX_LISTED_PROBLEMS]:
            path = self.path(place) if place else None
            first = first or path
            reason = self.text(reason, place)
            lines.append(line_of(path, reason))
        return VLLMValidationError("; ".join(lines), parameter=first)
