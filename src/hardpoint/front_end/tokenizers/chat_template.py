"""Chat templates: jinja text from a model, rendered in a sandbox and within a time limit.

A template comes with a model file and is not trusted: it cannot change what it is given, reach
Python or make giant strings by arithmetic, and is stopped when its time is up.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser

from hardpoint.env import envs
from hardpoint.errors import ConfigError, VLLMValidationError
from hardpoint.front_end.multimodal.parts import MediaPart, MediaParts

MAX_RENDERED_CHARS = 1 << 26
_MAX_POWER_BITS = 1 << 12
# Put behind a message that is to be continued. The space shows whether the template trims messages.
_MARK = "\ue000continued\ue001"
_MARK_AND_SPACE = _MARK + " "
# Arguments of `render_chat` that chat_template_kwargs may not smuggle in.
_RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)

_limit = threading.local()


class TemplateRefusal(jinja2.TemplateError):
    """What a template's `raise_exception` raises."""


class _Timed(CodeGenerator):
    """Compiles a look at the clock into every block, so that no loop outlives the limit."""

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only shows them."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox all chat templates run in."""

    code_generator_class = _Timed
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _strftime_now

    def check_time(self) -> None:
        """Called by compiled templates; raises TimeoutError once the limit has passed."""
        if time.monotonic() > getattr(_limit, "ends", float("inf")):
            raise TimeoutError

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of templates, with bounds where a small text could ask for a giant value."""
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | bytes | list | tuple) and isinstance(times, int):
                    _bound(len(text) * times <= MAX_RENDERED_CHARS)
        elif isinstance(left, int) and isinstance(right, int):
            _bound(left.bit_length() * abs(right) <= _MAX_POWER_BITS)
        return super().call_binop(context, operator, left, right)


def _bound(holds: bool) -> None:
    if not holds:
        raise TemplateRefusal("the chat template asks for a value of unreasonable size")


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


@lru_cache(maxsize=64)
def compile_template(template: str) -> jinja2.Template:
    """Compile a chat template; raises `VLLMValidationError` naming the line that is wrong."""
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as problem:
        raise VLLMValidationError(
            f"the chat template is not valid jinja: {problem.message} (line {problem.lineno})",
            parameter="chat_template",
        ) from None
    except RecursionError:
        raise VLLMValidationError("the chat template is nested too deeply", parameter="chat_template") from None


def load_chat_template(given: str | Path | None) -> str | None:
    """The template meant by `--chat-template`: the text of a file, or a template on one line.

    Raises ConfigError for a file that cannot be read and for what is not valid jinja.
    """
    if given is None:
        return None
    template = _template_text(given)
    try:
        compile_template(template)
    except VLLMValidationError as problem:
        raise ConfigError(
            str(problem), code="chat-template", origin="--chat-template", fix="correct the template"
        ) from None
    return template


def _template_text(given: str | Path) -> str:
    text = str(given)
    looks_like_template = any(sign in text for sign in "{}\n")
    if not looks_like_template or isinstance(given, Path):
        try:
            return Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise ConfigError(
                f"chat template {text!r} cannot be read: {problem}",
                code="chat-template",
                origin="--chat-template",
                fix="give the path of a jinja file, or a template on one line",
            ) from None
    # On a command line a line break is written as \n.
    return text if "\n" in text else text.replace("\\n", "\n").replace("\\t", "\t")


def render_chat(
    template: str | None,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation to the text the model was trained on.

    messages                dicts with `role` and `content` as the template wants them
    continue_final_message  end the text inside the last message, so that the model goes on with it
    variables               special tokens and chat_template_kwargs
    """
    if template is None:
        raise VLLMValidationError(
            "the model has no chat template; start the server with --chat-template, or use /v1/completions",
            parameter="messages",
        )
    if add_generation_prompt and continue_final_message:
        raise VLLMValidationError(
            "continue_final_message goes on with the last message and add_generation_prompt begins a new one; "
            "ask for one of them",
            parameter="continue_final_message",
        )
    taken = [name for name in _RESERVED if name in (variables or {})]
    if taken:
        raise VLLMValidationError(
            f"chat_template_kwargs may not set {', '.join(taken)}", parameter="chat_template_kwargs"
        )
    surplus = 0
    if continue_final_message:
        messages, surplus = _mark_end(messages)
    text = _render(
        compile_template(template),
        {
            **(variables or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_mark(text, surplus) if continue_final_message else text


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    seconds = envs.VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
    _limit.ends = time.monotonic() + seconds if seconds > 0 else float("inf")
    try:
        return _joined(template, variables)
    except TimeoutError:
        problem = f"rendering the chat template took longer than {seconds:g} seconds"
    except jinja2.TemplateError as error:
        problem = error.message or type(error).__name__
    except RecursionError:
        problem = "the chat template calls itself without end"
    except Exception as error:  # whatever a template does with values it did not expect
        problem = f"the chat template cannot render this conversation: {type(error).__name__}: {error}"
    finally:
        del _limit.ends
    raise VLLMValidationError(problem, parameter="messages")


def _joined(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    chunks, length = [], 0
    for chunk in template.generate(variables):
        length += len(chunk)
        _bound(length <= MAX_RENDERED_CHARS)
        chunks.append(chunk)
    return "".join(chunks)


def _mark_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The conversation with the end of its last message marked, and how many blanks end that message."""
    last = copy.deepcopy(messages[-1]) if messages else {}
    content = last.get("content")
    parts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    holder, key = (parts[-1], "text") if parts else (last, "content")
    text = holder.get(key)
    if not isinstance(text, str):
        raise VLLMValidationError(
            "continue_final_message needs a last message with text", parameter="continue_final_message"
        )
    holder[key] = text + _MARK_AND_SPACE
    return [*messages[:-1], last], len(text) - len(text.rstrip())


def _cut_at_mark(text: str, surplus: int) -> str:
    place = text.rfind(_MARK)
    if place < 0:
        raise VLLMValidationError(
            "continue_final_message: the chat template does not show the last message",
            parameter="continue_final_message",
        )
    trims = not text.startswith(_MARK_AND_SPACE, place)
    return text[: place - surplus] if trims else text[:place]


# -- which form of `content` a template reads --------------------------------------------------------


@lru_cache(maxsize=64)
def detect_content_format(template: str) -> str:
    """`openai` when the template walks through a message's content parts, else `string`."""
    try:
        tree = _environment().parse(template)
    except (jinja2.TemplateSyntaxError, RecursionError):
        return "string"
    return "openai" if _walks_content(tree) else "string"


def _walks_content(tree: nodes.Template) -> bool:
    conversations = _aliases(tree, lambda expression: _is_name(expression, {"messages"}), {"messages"})
    loops = list(tree.find_all(nodes.For))
    speakers = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and _is_name(_base(loop.iter), conversations)
    }

    def is_message(expression: nodes.Node) -> bool:
        return _is_name(expression, speakers) or (
            isinstance(expression, nodes.Getitem) and _is_name(expression.node, conversations)
        )

    messages = _aliases(tree, is_message, speakers)

    def is_content(expression: nodes.Node) -> bool:
        if isinstance(expression, nodes.Getattr):
            return expression.attr == "content" and (_is_name(expression.node, messages) or is_message(expression.node))
        if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const):
            return expression.arg.value == "content" and (
                _is_name(expression.node, messages) or is_message(expression.node)
            )
        return False

    contents = _aliases(tree, is_content, set())
    return any(is_content(_base(loop.iter)) or _is_name(_base(loop.iter), contents) for loop in loops)


def _aliases(tree: nodes.Template, matches: Callable[[nodes.Node], bool], names: set[str]) -> set[str]:
    """Names that `{% set %}` gives to expressions that match, directly or through one another."""
    known = set(names)
    assignments = [a for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    while True:
        found = {
            a.target.name  # type: ignore[attr-defined]
            for a in assignments
            if matches(_base(a.node)) or _is_name(_base(a.node), known)
        }
        if found <= known:
            return known
        known |= found


def _base(expression: nodes.Node) -> nodes.Node:
    """What filters and slices are applied to."""
    inner = _inner(expression)
    return expression if inner is None else _base(inner)


def _inner(expression: nodes.Node) -> nodes.Node | None:
    if isinstance(expression, nodes.Filter):
        return expression.node
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Slice):
        return expression.node
    return None


def _is_name(expression: nodes.Node, names: set[str]) -> bool:
    return isinstance(expression, nodes.Name) and expression.name in names


# -- OpenAI messages to what templates read ----------------------------------------------------------

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


def conversation(messages: list[Any], content_format: str, media: MediaParts | None = None) -> list[dict[str, Any]]:
    """OpenAI messages in the form a template reads.

    content_format  `string` joins text parts with line breaks; `openai` keeps a list of parts
    media           takes the parts that are no text; None = there may be none

    Raises `VLLMValidationError` for parts that are neither text nor media the model takes.
    """
    media = media or MediaParts()
    return [_message(message, place, content_format, media) for place, message in enumerate(messages)]


def _message(message: Any, place: int, content_format: str, media: MediaParts) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise VLLMValidationError("every message needs a role", parameter=f"messages.{place}.role")
    result = {key: value for key, value in message.items() if value is not None}
    pieces = _pieces(message.get("content"), place, media)
    if content_format == "openai":
        result["content"] = [
            {"type": "text", "text": piece} if isinstance(piece, str) else {"type": piece.modality} for piece in pieces
        ]
    else:
        result["content"] = media.text_of(pieces, f"messages.{place}.content")
    if result.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call, place) for call in result["tool_calls"]]
    reasoning = result.get("reasoning", result.get("reasoning_content"))
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    return result


def _pieces(content: Any, place: int, media: MediaParts) -> list[str | MediaPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list | tuple):
        raise VLLMValidationError("content must be text or a list of parts", parameter=f"messages.{place}.content")
    return [
        media.take(part, f"messages.{place}.content.{number}") if media.knows(part) else _part_text(part, place, number)
        for number, part in enumerate(content)
    ]


def _part_text(part: Any, place: int, number: int) -> str:
    where = f"messages.{place}.content.{number}"
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise VLLMValidationError(
            f"content parts of type {kind!r} are not supported: this model reads text", parameter=where
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise VLLMValidationError(f"a part of type {kind!r} needs a text", parameter=where)
    return text


def _tool_call(call: Any, place: int) -> Any:
    """Templates want a call's arguments as an object, OpenAI clients send them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            raise VLLMValidationError(
                "the arguments of a tool call must be JSON", parameter=f"messages.{place}.tool_calls"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
