"""Reasoning between two marks: the shared machine behind the built-in reasoning parsers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hardpoint.contracts.reasoning_parser import ReasoningParser
from hardpoint.front_end.parsers.calls import first_mark
from hardpoint.front_end.parsers.json_text import WHITESPACE
from hardpoint.types.answers import DeltaMessage

# How much of the end of a text is decoded to look for a mark that is no token of its own.
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class ThinkFormat:
    """How a family of models marks its reasoning.

    starts    any of these begins it
    ends      any of these ends it
    implicit  an answer begins with reasoning also without a start mark
    breaks    these end it too, and belong to the content
    dropped   marks around the content that mean nothing
    keeps     reasoning and its marks are content
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    implicit: bool = False
    breaks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    keeps: bool = False


class ThinkScanner:
    """Reads one answer in pieces of any size: `feed` and `close` give (is reasoning, text) pairs.

    White space around the reasoning and in front of the content is left out.
    """

    def __init__(self, form: ThinkFormat, place: str = "start") -> None:
        """Begin at `place`: `start`, `reasoning` or `content`."""
        self._form = form
        self._place = place
        self._text = ""
        # Nothing has been given of this stretch yet: white space is left out.
        self._fresh = place != "content"
        self._out: list[tuple[bool, str]] = []

    @property
    def in_content(self) -> bool:
        """Whether the reasoning is over."""
        return self._place == "content"

    def feed(self, text: str) -> list[tuple[bool, str]]:
        """More of the answer; what it makes certain."""
        self._text += text
        while getattr(self, f"_{self._place}")():
            pass
        return self._take()

    def close(self) -> list[tuple[bool, str]]:
        """The answer is over."""
        if self._place == "start" and self._text:
            self._place = "reasoning" if self._form.implicit else "content"
        if self._place == "reasoning":
            self._give(True, self._text.rstrip(WHITESPACE))
        else:
            self._give(False, self._text)
        self._text = ""
        return self._take()

    def _take(self) -> list[tuple[bool, str]]:
        out, self._out = self._out, []
        return out

    def _give(self, reasoning: bool, text: str) -> None:
        if self._fresh:
            text = text.lstrip(WHITESPACE)
        if text:
            self._fresh = False
            self._out.append((reasoning, text))

    def _start(self) -> bool:
        begins = self._text.lstrip(WHITESPACE)
        for mark in self._form.starts:
            if begins.startswith(mark):
                self._text, self._place = begins[len(mark) :], "reasoning"
                return True
        if not begins or any(mark.startswith(begins) for mark in self._form.starts):
            return False
        self._place = "reasoning" if self._form.implicit else "content"
        self._fresh = self._form.implicit
        return True

    def _reasoning(self) -> bool:
        at, mark = first_mark(self._text, (*self._form.ends, *self._form.breaks))
        shown = self._text[:at].rstrip(WHITESPACE)
        self._give(True, shown)
        if not mark:
            self._text = self._text[len(shown) :]
            return False
        self._text = self._text[at if mark in self._form.breaks else at + len(mark) :]
        self._place, self._fresh = "content", True
        return True

    def _content(self) -> bool:
        at, mark = first_mark(self._text, self._form.dropped)
        self._give(False, self._text[:at])
        self._text = self._text[at + len(mark) :]
        return bool(mark)


class ThinkingParser(ReasoningParser):
    """Reads the reasoning of one `format`."""

    format: ClassVar[ThinkFormat]

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._form = self.choose_format(kwargs.get("chat_template_kwargs") or {})
        self._place = "start"
        self._scanner = self._new_scanner()

    def choose_format(self, template_kwargs: dict[str, Any]) -> ThinkFormat:
        """The format, for a request's chat template arguments."""
        return self.format

    def _new_scanner(self) -> ThinkScanner:
        return ThinkScanner(self._form, self._place)

    @property
    def reasoning_start_str(self) -> str | None:
        """What begins the reasoning."""
        return self._form.starts[0] if self._form.starts else None

    @property
    def reasoning_end_str(self) -> str | None:
        """What ends the reasoning."""
        return self._form.ends[0]

    def adjust_request(self, request: Any) -> Any:
        """Keep special tokens in the text where the marks are some."""
        special = set(getattr(self.model_tokenizer, "all_special_tokens", ()))
        if special.intersection((*self._form.starts, *self._form.ends, *self._form.breaks)):
            request.skip_special_tokens = False
        return request

    def adjust_initial_state_from_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """A template may have begun the reasoning, or begun and ended it."""
        last = self._last_mark(prompt_token_ids)
        if last is not None:
            self._place = "reasoning" if last in self._form.starts else "content"
        elif self._form.implicit and self._starts_itself():
            self._form = replace(self._form, implicit=False)
        self._scanner = self._new_scanner()

    def marks_of_start(self, prompt_token_ids: Sequence[int]) -> Sequence[str] | None:
        """The start marks, where reasoning is marked and not begun yet."""
        self.adjust_initial_state_from_prompt(prompt_token_ids)
        return None if self._place != "start" or self._form.implicit or self._form.keeps else self._form.starts

    def _starts_itself(self) -> bool:
        """Whether a model that was not put into its reasoning by the template begins it with the start mark."""
        return False

    def _last_mark(self, token_ids: Sequence[int]) -> str | None:
        """The last mark of the turn that is being written; None when it has none."""
        marks = (*self._form.starts, *self._form.ends)
        found = {self.vocab[mark]: mark for mark in marks if mark in self.vocab}
        if len(found) < len(marks):
            return self._last_mark_in_text(token_ids, marks)
        special = set(getattr(self.model_tokenizer, "all_special_ids", ())) - found.keys()
        for token_id in reversed(token_ids):
            if token_id in found:
                return found[token_id]
            if token_id in special:
                return None
        return None

    def _last_mark_in_text(self, token_ids: Sequence[int], marks: Sequence[str]) -> str | None:
        special = set(getattr(self.model_tokenizer, "all_special_ids", ()))
        own = {self.vocab[mark] for mark in marks if mark in self.vocab}
        begins = next((i + 1 for i in range(len(token_ids) - 1, -1, -1) if token_ids[i] in special - own), 0)
        text = self.model_tokenizer.decode(list(token_ids[begins:]))
        places = [(text.rfind(mark), mark) for mark in marks if mark in text]
        return max(places)[1] if places else None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last mark of the turn ends reasoning."""
        return self._last_mark(input_ids) in self._form.ends

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether an end mark is complete with the new ids."""
        new = list(delta_ids)
        ids = [self.vocab.get(mark) for mark in self._form.ends]
        if None not in ids:
            return any(token_id in ids for token_id in new)
        tail = self.model_tokenizer.decode(list(input_ids[-(len(new) + _TAIL_TOKENS) :]))
        before = self.model_tokenizer.decode(list(input_ids[-(len(new) + _TAIL_TOKENS) : len(input_ids) - len(new)]))
        return any(tail.count(mark) > before.count(mark) for mark in self._form.ends)

    def has_engine_confirmed_reasoning_end(self) -> bool:
        """Whether the end mark has been read."""
        return self._scanner.in_content

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The ids behind the end mark; none while there is none."""
        return list(input_ids[self._content_begins(input_ids) :])

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Ids in front of the end mark, the marks themselves not counted."""
        if self._place == "content":
            return 0
        ids = list(token_ids)
        marks = {self.vocab.get(mark) for mark in (*self._form.starts, *self._form.ends)}
        if self._place == "start" and not self._form.implicit and not self._begins_with_start(ids):
            return 0
        return sum(token_id not in marks for token_id in ids[: self._content_begins(ids)])

    def _begins_with_start(self, ids: list[int]) -> bool:
        text = self.model_tokenizer.decode(ids[:_TAIL_TOKENS]).lstrip(WHITESPACE)
        return text.startswith(self._form.starts)

    def _content_begins(self, ids: Sequence[int]) -> int:
        """The place of the first id behind the end mark; their number when there is none."""
        found = {self.vocab.get(mark) for mark in self._form.ends} - {None}
        if found:
            return next((i + 1 for i, token_id in enumerate(ids) if token_id in found), len(ids))
        low, high = 0, len(ids)
        if not any(mark in self.model_tokenizer.decode(list(ids)) for mark in self._form.ends):
            return high
        while low < high:
            middle = (low + high) // 2
            text = self.model_tokenizer.decode(list(ids[:middle]))
            low, high = (low, middle) if any(mark in text for mark in self._form.ends) else (middle + 1, high)
        return low

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The reasoning and the content of a whole answer."""
        if self._form.keeps:
            return None, model_output or None
        scanner = self._new_scanner()
        pairs = [*scanner.feed(model_output), *scanner.close()]
        return _joined(pairs, True), _joined(pairs, False)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What the next piece of a stream adds."""
        if self._form.keeps:
            return DeltaMessage(content=delta_text) if delta_text else None
        return _message(self._scanner.feed(delta_text))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return None if self._form.keeps else _message(self._scanner.close())


def _joined(pairs: list[tuple[bool, str]], reasoning: bool) -> str | None:
    return "".join(text for kind, text in pairs if kind is reasoning) or None


def _message(pairs: list[tuple[bool, str]]) -> DeltaMessage | None:
    return DeltaMessage(reasoning=_joined(pairs, True), content=_joined(pairs, False)) if pairs else None
