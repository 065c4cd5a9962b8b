"""Request hooks at work: requests pass them on the way in, texts on the way out, a piece at a time."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from hardpoint.contracts.request_hook import ARGUMENTS, CONTENT, REASONING, HookedRequest, RequestHook, RequestRefused
from hardpoint.errors import EngineGenerateError, PluginError
from hardpoint.extensions.boot import load_request_hooks, owner_of
from hardpoint.extensions.faults import note_fault
from hardpoint.extensions.ledger import Origin, attributing
from hardpoint.front_end.parsers.answers import Answer, merged
from hardpoint.front_end.server.errors import ApiError
from hardpoint.log import init_logger
from hardpoint.types.answers import DeltaMessage, DeltaToolCall

logger = init_logger(__name__)
B = TypeVar("B", bound=BaseModel)
# What in a request asks for tokens beside the text, which no filter sees.
_TELLING = ("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids")


class RequestHooks:
    """The hooks of one server, in order."""

    def __init__(self, hooks: Sequence[RequestHook] = ()) -> None:
        self._hooks = tuple(hooks)

    @classmethod
    def build(cls, vllm_config: Any) -> RequestHooks:
        """Load and build what is installed. Raises PluginError when one cannot be built."""
        hooks = []
        for kind in load_request_hooks():
            origin = _origin(kind)
            with attributing(origin):
                try:
                    hooks.append(kind(vllm_config))
                except Exception as error:
                    raise PluginError(
                        f"request hook {kind.__qualname__} cannot be built: {type(error).__name__}: {error}",
                        code="plugin-call",
                        origin=origin.label,
                        fix="mend it, or leave it out of VLLM_PLUGINS",
                    ) from error
            logger.info("request hook %s (%s) watches over requests", kind.__qualname__, origin.label)
        return cls(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    async def admit(self, body: B, http: Request) -> B:
        """Show a request to every hook; the body to go on with, checked again where a hook changed it.

        Raises what refuses the request: ApiError, RequestValidationError, EngineGenerateError for a hook that fails.
        """
        if not self._hooks:
            return body
        given = await http.json()
        client = http.client.host if http.client is not None else ""
        hooked = HookedRequest(http.url.path, copy.deepcopy(given), http.headers, client)
        for hook in self._hooks:
            with _blaming(hook):
                await hook.before_admission(hooked)
        http.state.hooked_request = hooked
        if hooked.body == given:
            return body
        try:
            return type(body).model_validate(hooked.body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None

    def texts_of(self, body: Any, http: Request) -> AnswerTexts | None:
        """What reads the texts of a request's answers; None without hooks.

        Raises ApiError for a request that would be told what a filter takes away.
        """
        hooked = getattr(http.state, "hooked_request", None)
        if not self._hooks or hooked is None:
            return None
        texts = AnswerTexts(self._hooks, hooked)
        asked = next((name for name in _TELLING if getattr(body, name, None)), None)
        changing = next((hook for hook in self._hooks if hook.changes_text), None)
        if asked is not None and changing is not None and texts.filters_anything(changing):
            name = type(changing).__qualname__
            raise ApiError(f"{asked} is not possible here: the request hook {name} may change the text", param=asked)
        return texts


@contextmanager
def _blaming(hook: RequestHook) -> Iterator[None]:
    """What the block raises is a refusal, or the hook's fault, which ends the request."""
    origin = _origin(type(hook))
    try:
        with attributing(origin):
            yield
    except RequestRefused as refusal:
        status = refusal.status if 400 <= refusal.status <= 599 else 400
        raise ApiError(refusal.message, status=status, kind=refusal.kind) from None
    except (Exception, SystemExit) as error:
        what = f"the request hook {type(hook).__qualname__} failed: {type(error).__name__}: {error}"
        logger.error("%s\n%s", what, "".join(traceback.format_exception(error)))
        note_fault("request_hooks", type(hook).__qualname__, what, origin)
        raise EngineGenerateError(what, code="request-hook", origin=origin.label) from error


def _origin(kind: type) -> Origin:
    found = owner_of(kind)
    return found.origin if found is not None else Origin(module=kind.__module__)


class _Text:
    """One text through the filters of all hooks."""

    def __init__(self, hooks: Sequence[RequestHook], request: HookedRequest, choice: int, channel: str) -> None:
        self._filters = []
        for hook in hooks:
            with _blaming(hook):
                made = hook.text_filter(request, choice, channel)
            if made is not None:
                self._filters.append((hook, made))

    def feed(self, text: str) -> str:
        return self._through(text, 0) if text else text

    def finish(self) -> str:
        """What the filters kept back, each one's rest passed on to those behind it."""
        rest = ""
        for index, (hook, one) in enumerate(self._filters):
            with _blaming(hook):
                kept = _text(one.finish())
            rest += self._through(kept, index + 1) if kept else ""
        return rest

    def _through(self, text: str, first: int) -> str:
        for hook, one in self._filters[first:]:
            if not text:
                break
            with _blaming(hook):
                text = _text(one.feed(text))
        return text


def _text(value: Any) -> str:
    """What a filter returned, which must be a text: nothing may be lost without a word."""
    if not isinstance(value, str):
        raise TypeError(f"its filter returned {type(value).__name__}, not a text")
    return value


class AnswerTexts:
    """Makes the readers of a request's answers."""

    def __init__(self, hooks: Sequence[RequestHook], request: HookedRequest) -> None:
        self._hooks = hooks
        self._request = request

    def filters_anything(self, hook: RequestHook) -> bool:
        """Whether a hook wants to see a text of this request."""
        with _blaming(hook):
            return any(hook.text_filter(self._request, 0, channel) for channel in (CONTENT, REASONING, ARGUMENTS))

    def text(self, choice: int, channel: str = CONTENT) -> _Text:
        """The filters of one text."""
        return _Text(self._hooks, self._request, choice, channel)

    def reader(self, choice: int, reader: Reader | None) -> FilteredReader:
        """A reader whose every text has passed the filters."""
        return FilteredReader(self, choice, reader or PlainReader())


class Reader(Protocol):
    """What reads one answer: `AnswerReader`, or one of ours in front of it."""

    def feed(self, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        """The next piece."""

    def finish(self) -> DeltaMessage | None:
        """What was held back."""

    def whole(self, text: str, token_ids: Sequence[int]) -> Answer:
        """The whole answer."""

    def finish_reason(self, reason: str) -> str:
        """Why it ended."""

    def reasoning_tokens(self) -> int | None:
        """How many tokens were reasoning."""


class PlainReader:
    """Reads an answer whose text is its content."""

    def feed(self, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        """The text as content."""
        return DeltaMessage(content=text) if text else None

    def finish(self) -> DeltaMessage | None:
        """Nothing is held back."""
        return None

    def whole(self, text: str, token_ids: Sequence[int]) -> Answer:
        """The text as content."""
        return Answer(content=text)

    def finish_reason(self, reason: str) -> str:
        """The engine's."""
        return reason

    def reasoning_tokens(self) -> int | None:
        """Nobody counts them."""
        return None


class FilteredReader:
    """A reader in front of another one: what that gives passes the filters, channel by channel."""

    def __init__(self, texts: AnswerTexts, choice: int, reader: Reader) -> None:
        self._texts = texts
        self._choice = choice
        self._reader = reader
        self._channels: dict[tuple[str, int], _Text] = {}

    def feed(self, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        """The next piece, filtered; None while nothing of it may be sent."""
        return self._filtered(self._reader.feed(text, token_ids))

    def finish(self) -> DeltaMessage | None:
        """What the reader and the filters kept back."""
        message = self._filtered(self._reader.finish())
        for (channel, index), filters in self._channels.items():
            rest = filters.finish()
            if rest:
                message = merged(message, _of_channel(channel, index, rest))
        return message

    def whole(self, text: str, token_ids: Sequence[int]) -> Answer:
        """The whole answer, filtered."""
        answer = self._reader.whole(text, token_ids)
        if answer.content is not None:
            answer.content = self._all(CONTENT, answer.content)
        if answer.reasoning is not None:
            answer.reasoning = self._all(REASONING, answer.reasoning)
        for index, call in enumerate(answer.tool_calls):
            call.function.arguments = self._all(ARGUMENTS, call.function.arguments, index)
        return answer

    def finish_reason(self, reason: str) -> str:
        """The reader's."""
        return self._reader.finish_reason(reason)

    def reasoning_tokens(self) -> int | None:
        """The reader's count."""
        return self._reader.reasoning_tokens()

    def _all(self, channel: str, text: str, index: int = 0) -> str:
        filters = self._channel(channel, index)
        return filters.feed(text) + filters.finish()

    def _channel(self, channel: str, index: int = 0) -> _Text:
        key = (channel, index)
        if key not in self._channels:
            self._channels[key] = self._texts.text(self._choice, channel)
        return self._channels[key]

    def _filtered(self, message: DeltaMessage | None) -> DeltaMessage | None:
        if message is None:
            return None
        content = self._channel(CONTENT).feed(message.content) if message.content else None
        thought = self._channel(REASONING).feed(message.thought) if message.thought else None
        calls = [call for call in map(self._call, message.tool_calls) if call is not None]
        if not (content or thought or calls):
            return None
        return DeltaMessage(content=content or None, reasoning=thought or None, tool_calls=calls)

    def _call(self, call: DeltaToolCall) -> DeltaToolCall | None:
        """A fragment with its arguments filtered; None where nothing is left of it."""
        if call.function is None or not call.function.arguments:
            return call
        arguments = self._channel(ARGUMENTS, call.index).feed(call.function.arguments)
        if not arguments and call.function.name is None:
            return None
        function = call.function.model_copy(update={"arguments": arguments or None})
        return call.model_copy(update={"function": function})


def _of_channel(channel: str, index: int, text: str) -> DeltaMessage:
    if channel == CONTENT:
        return DeltaMessage(content=text)
    if channel == REASONING:
        return DeltaMessage(reasoning=text)
    return DeltaMessage(tool_calls=[DeltaToolCall.model_validate({"index": index, "function": {"arguments": text}})])
