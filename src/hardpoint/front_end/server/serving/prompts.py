"""From a request's prompt or messages to token ids the engine can run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.multimodal.parts import processing_threads
from hardpoint.front_end.prompts import TokenPrompt
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest
from hardpoint.front_end.server.protocol.completions import CompletionRequest
from hardpoint.front_end.server.protocol.pooling import InputRequest
from hardpoint.front_end.server.protocol.sampling import SharedRequest
from hardpoint.front_end.server.protocol.tokenize import TokenizeChatRequest
from hardpoint.front_end.server.serving.context import ServerContext

# A text this long is tokenised in a thread, so that other requests' streams go on meanwhile.
_LONG_TEXT_CHARS = 16_384
# What counts as longer than any text: it may wait for other servers, and has threads of its own.
_MEDIA = 1 << 60
# Arguments of rendering that have fields of their own.
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}


class PromptMaker:
    """Tokenises texts and renders conversations for one server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._inputs = context.engine.input_processor

    async def of_completion(self, request: CompletionRequest) -> list[TokenPrompt]:
        """The prompts of a completion request, truncated as it asks."""
        return [await self._tokenized(item, request, request.add_special_tokens) for item in request.prompts()]

    async def _tokenized(self, item: str | list[int], request: SharedRequest, add_special_tokens: bool) -> TokenPrompt:
        given: dict[str, Any] = {"prompt": item} if isinstance(item, str) else {"prompt_token_ids": item}
        if request.cache_salt is not None:
            given["cache_salt"] = request.cache_salt
        how = {
            "add_special_tokens": add_special_tokens,
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "truncation_side": request.truncation_side,
        }
        return await _beside(len(item), self._inputs.tokenize, given, how)

    async def text(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""
        how = {"add_special_tokens": add_special_tokens}
        prompt = await _beside(len(text), self._inputs.tokenize, {"prompt": text}, how)
        return prompt.token_ids

    async def of_chat(self, request: ChatCompletionRequest) -> TokenPrompt:
        """The prompt a conversation makes."""
        kwargs = _template_kwargs(request)
        for name in ("documents", "reasoning_effort"):
            value = getattr(request, name)
            if value is not None:
                self._need_in_template(request, name)
                kwargs[name] = value
        rendered = await self._rendered(request, kwargs)
        how = {
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "truncation_side": request.truncation_side,
        }
        cut = self._inputs.tokenize({key: value for key, value in rendered.items() if key != "prompt"}, how)
        return TokenPrompt(cut.token_ids, rendered["prompt"], request.cache_salt, cut.features)

    async def of_conversation(self, request: InputRequest, messages: list[dict[str, Any]]) -> TokenPrompt:
        """The prompt a conversation makes for a pooling model, which adds no answer to it."""
        request = request.model_copy(
            update={"messages": messages, "add_special_tokens": bool(request.add_special_tokens)}
        )
        rendered = await self._rendered(request, _template_kwargs(request))
        how = {
            "truncate_prompt_tokens": request.truncate_prompt_tokens,
            "truncation_side": request.truncation_side,
        }
        cut = self._inputs.tokenize({"prompt_token_ids": rendered["prompt_token_ids"]}, how, 0)
        return TokenPrompt(cut.token_ids, rendered["prompt"], request.cache_salt)

    def template_arguments(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """What the template gets beside the messages, as far as it says how to think."""
        effort = {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort is not None else {}
        return {**(self._context.settings.default_chat_template_kwargs or {}), **_template_kwargs(request), **effort}

    async def of_tokenize_chat(self, request: TokenizeChatRequest) -> list[int]:
        """The ids a conversation makes."""
        return (await self._rendered(request, _template_kwargs(request)))["prompt_token_ids"]

    async def _rendered(
        self, request: ChatCompletionRequest | TokenizeChatRequest | InputRequest, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The conversation as the text the model was trained on, and its ids."""
        settings = self._context.settings
        if request.chat_template is not None and not settings.trust_request_chat_template:
            raise VLLMValidationError(
                "chat_template in a request needs a server started with --trust-request-chat-template",
                parameter="chat_template",
            )
        tools = [tool.model_dump(exclude_none=True) for tool in getattr(request, "tools", None) or ()]
        if settings.exclude_tools_when_tool_choice_none and getattr(request, "tool_choice", None) == "none":
            tools = []
        own_options = {
            name: getattr(request, name, None) or None for name in ("mm_processor_kwargs", "media_io_kwargs")
        }
        self._check_media_options(own_options)
        messages: list[Any] = list(request.messages or ())
        length = sum(_length(message.get("content")) for message in messages)
        return await _beside(
            length,
            self._render,
            messages,
            **own_options,
            chat_template=request.chat_template or self._context.chat_template,
            chat_template_content_format=settings.chat_template_content_format,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            tools=tools or None,
            chat_template_kwargs={**(settings.default_chat_template_kwargs or {}), **kwargs},
            add_special_tokens=request.add_special_tokens,
        )

    def _render(self, messages: list[dict[str, Any]], **how: Any) -> dict[str, Any]:
        return self._inputs.render_chat(messages, **how)

    def _check_media_options(self, options: dict[str, Any]) -> None:
        """A request's own options for media reach the model's processor only where the server trusts requests."""
        for name, value in options.items():
            if value is None:
                continue
            if getattr(self._inputs, "media", None) is None:
                raise VLLMValidationError(f"{name} is not supported: this model reads text", parameter=name)
            if not self._context.settings.trust_request_mm_kwargs:
                raise VLLMValidationError(
                    f"{name} in a request needs a server started with --trust-request-mm-kwargs", parameter=name
                )

    def _need_in_template(self, request: ChatCompletionRequest, name: str) -> None:
        """A field only the template could honour is refused when the template never reads it."""
        tokenizer = self._context.tokenizer
        given = request.chat_template or self._context.chat_template
        text = tokenizer.get_chat_template(given, request.tools) if tokenizer is not None else None
        if name not in (text or ""):
            raise VLLMValidationError(
                f"{name} is not supported: this model's chat template does not use it", parameter=name
            )


def _template_kwargs(request: ChatCompletionRequest | TokenizeChatRequest | InputRequest) -> dict[str, Any]:
    kwargs = dict(request.chat_template_kwargs or {})
    taken = sorted(_RESERVED & kwargs.keys())
    if taken:
        raise VLLMValidationError(
            f"chat_template_kwargs may not set {', '.join(taken)}", parameter="chat_template_kwargs"
        )
    return kwargs


def _length(content: Any) -> int:
    """Characters of a message; `_MEDIA` for one with media, which are fetched and processed."""
    if not isinstance(content, list):
        return len(str(content))
    plain = all(isinstance(part, str) or (isinstance(part, dict) and "text" in part) for part in content)
    return len(str(content)) if plain else _MEDIA


async def _beside(size: int, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Do `work`; a large piece of it beside the event loop."""
    if size < _LONG_TEXT_CHARS:
        return work(*args, **named)
    if size >= _MEDIA:
        return await asyncio.get_running_loop().run_in_executor(processing_threads(), partial(work, *args, **named))
    return await asyncio.to_thread(work, *args, **named)


def output_limit(
    asked: int | None, prompt: TokenPrompt, max_model_len: int, *, name: str, prompt_name: str, exact: bool
) -> int:
    """How many tokens may follow a prompt.

    asked   the request's limit; None = what fits
    exact   whether the client asked for `asked` itself: then more than fits is refused, not cut

    Raises VLLMValidationError when the prompt leaves no room.
    """
    room = max_model_len - len(prompt.token_ids)
    if room < 1:
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has "
            f"{len(prompt.token_ids)} and leaves no room for an answer",
            parameter=prompt_name,
        )
    if asked is None:
        return room
    if asked > room and exact:
        raise VLLMValidationError(
            f"{name}={asked} is too large: this model's maximum context length is {max_model_len} tokens and the "
            f"prompt has {len(prompt.token_ids)}, which leaves {room}",
            parameter=name,
        )
    return min(asked, room)
