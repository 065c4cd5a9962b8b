"""The shared machine behind the built-in tool parsers: text in pieces of any size, content and calls out.

A format says which marks begin a call and gives a `Body`, which reads what follows the mark. Every decision
depends on the text alone and never on where it was cut, so that a stream adds up to the whole answer.

What a body cannot read before it has named a function was no call: it becomes content. Once the function is named,
its arguments go out as they come; if they then turn out to be no JSON, the rest of the call is passed on as it is,
for the client to judge.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hardpoint.front_end.parsers.json_text import WHITESPACE
from hardpoint.types.answers import new_call_id


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a function; its arguments follow."""

    name: str
    id: str


@dataclass(frozen=True, slots=True)
class ArgumentText:
    """More of the arguments' JSON of the call begun last."""

    text: str


Event = Content | CallBegun | ArgumentText


class Reading(enum.Enum):
    """How far a body is."""

    MORE = "wants more text"
    DONE = "its part is over"
    BAD = "this is no call"


class Sink:
    """Takes what a body finds; `new_id` makes ids for calls without one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.begun = 0
        self.new_id: Callable[[], str] = new_call_id

    def begin(self, name: str, call_id: str = "") -> None:
        """A call of a function begins."""
        self.begun += 1
        self.events.append(CallBegun(name, call_id or self.new_id()))

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        if text:
            self.events.append(ArgumentText(text))


class Body:
    """Reads what follows a mark, once. `in_arguments`: text that cannot be read belongs to the arguments."""

    in_arguments = False

    def __init__(self, sink: Sink, tools: Sequence[object]) -> None:
        self.sink = sink
        self.tools = tools

    def feed(self, text: str) -> tuple[Reading, int]:
        """Read from a text that goes on where the last one was used up.

        Returns how far it is and how many characters are used up; what is not is given again, with more behind it,
        except when the part is over or bad.
        """
        raise NotImplementedError

    def close(self, text: str) -> bool:
        """The answer ends with `text`, which was not used up; whether the part is complete."""
        return False


@dataclass(frozen=True)
class CallFrame:
    """What stands around the arguments of every call, where that is always the same text; `{name}` is the name as JSON.

    begin  starts with the format's first mark
    """

    begin: str
    end: str


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    marks     what begins a call; the body gets the text behind it
    body      makes the reader of one part, from where its calls go, the request's tools and the mark
    at_start  marks that count only where the answer begins; the body gets them too
    ends      ends a call: where to go on after text that could not be read
    dropped   marks around calls that mean nothing
    frame     lets arguments be held to a schema while they are written
    """

    body: Callable[[Sink, Sequence[object], str], Body]
    marks: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    frame: CallFrame | None = None

    @property
    def written(self) -> tuple[str, ...]:
        """Every mark a model of the family writes."""
        return (*self.marks, *self.dropped, *self.ends)


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Where the first mark begins, and which; with "" where one may still be on its way at the end of the text.

    (len(text), "") when there is none. Of two at one place the longer counts.
    """
    places = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    begins = len(text) - partial_mark(text, marks)
    if places:
        at, _, mark = min(places)
        if at <= begins:
            return at, mark
    return begins, ""


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(most, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(mark) > length and mark.startswith(tail) for mark in marks):
            return length
    return 0


@dataclass
class _Part:
    """The part being read.

    gap   white space in front of its mark
    text  what was used up since the mark, as long as it may turn out to be no call
    """

    body: Body
    sink: Sink
    gap: str
    mark: str
    text: str = ""


class CallScanner:
    """Reads one answer of one format."""

    def __init__(self, form: CallFormat, tools: Sequence[object] = ()) -> None:
        self._form = form
        self._tools = tools
        self._marks = (*form.marks, *form.dropped)
        self._text = ""
        self._part: _Part | None = None
        self._passes_on = False
        self._started = False
        self._after_call = False
        self._may_end = False
        self._said = False
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """More of the answer; what it makes certain."""
        self._text += text
        while self._step():
            pass
        return self._take()

    def close(self) -> list[Event]:
        """The answer is over; the rest of what it holds."""
        if self._part is not None:
            self._close_part(self._part)
        elif self._passes_on:
            self._events.append(ArgumentText(self._text))
        else:
            self._say(self._text)
        self._text = ""
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return [event for event in events if isinstance(event, CallBegun) or event.text]

    def _step(self) -> bool:
        """Do one thing; False when more text is needed for the next."""
        if self._part is not None:
            return self._read_part(self._part)
        if self._passes_on:
            return self._pass_on()
        if self._may_end and self._form.ends:
            return self._look_for_end()
        if not self._started and self._form.at_start:
            return self._look_at_start()
        return self._look_for_mark()

    # -- content ----------------------------------------------------------------------------------

    def _look_at_start(self) -> bool:
        begins = self._text.lstrip(WHITESPACE)
        if not begins:
            return False
        for mark in self._form.at_start:
            if begins.startswith(mark):
                return self._begin(self._text[: len(self._text) - len(begins)], "", begins)
        if any(mark.startswith(begins) for mark in self._form.at_start):
            return False
        self._started = True
        return True

    def _look_for_mark(self) -> bool:
        at, mark = first_mark(self._text, self._marks)
        # White space in front of a call is no content, so it waits for what follows.
        shown = self._text[:at].rstrip(WHITESPACE)
        self._say(shown)
        if not mark:
            self._text = self._text[len(shown) :]
            return False
        gap, rest = self._text[len(shown) : at], self._text[at + len(mark) :]
        if mark in self._form.marks:
            return self._begin(gap, mark, rest)
        self._text, self._started, self._after_call = rest, True, True
        return bool(rest)

    def _say(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip(WHITESPACE)
            # What stood in front of the calls and what stands behind them are not one line.
            text = f"\n{text}" if text and self._said else text
        if text:
            self._started, self._after_call, self._said = True, False, True
            self._events.append(Content(text))

    # -- a call -----------------------------------------------------------------------------------

    def _begin(self, gap: str, mark: str, text: str) -> bool:
        sink = Sink()
        self._part = _Part(self._form.body(sink, self._tools, mark), sink, gap, mark)
        self._text, self._started = text, True
        return True

    def _read_part(self, part: _Part) -> bool:
        reading, used = part.body.feed(self._text)
        if not part.sink.begun:
            part.text += self._text[:used]
        rest = self._text[used:]
        self._drain(part)
        if reading is Reading.MORE:
            self._text = rest
            return False
        self._part = None
        if reading is Reading.BAD and not part.sink.begun:
            self._give_back(part, rest)
            return True
        self._text, self._after_call = rest, True
        self._passes_on = reading is Reading.BAD and part.body.in_arguments
        self._may_end = True
        return True

    def _drain(self, part: _Part) -> None:
        self._events += part.sink.events
        part.sink.events = []

    def _give_back(self, part: _Part, rest: str) -> None:
        """It was no call: its mark is content, and what follows is looked at anew."""
        mark, text = part.mark, part.text + rest
        if not mark:
            # It was taken for a call because of its first character.
            mark, text = text[:1], text[1:]
        self._say(part.gap + mark)
        self._text = text

    def _close_part(self, part: _Part) -> None:
        complete = part.body.close(self._text)
        self._drain(part)
        self._part = None
        if not complete and not part.sink.begun:
            self._say(part.gap + part.mark + part.text + self._text)

    def _pass_on(self) -> bool:
        """Give text that a body could not read to the client, up to where its call ends."""
        at, mark = first_mark(self._text, self._form.ends)
        self._events.append(ArgumentText(self._text[:at]))
        self._text = self._text[at + len(mark) :]
        self._passes_on = not mark
        return bool(mark)

    def _look_for_end(self) -> bool:
        """An end mark right behind a call that its reader took for over."""
        begins = self._text.lstrip(WHITESPACE)
        found = next((mark for mark in self._form.ends if begins.startswith(mark)), "")
        if not found and any(mark.startswith(begins) for mark in self._form.ends):
            return False
        self._text = begins[len(found) :]
        self._may_end = bool(found)
        return True
