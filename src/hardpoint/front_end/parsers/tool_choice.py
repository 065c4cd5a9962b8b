"""What `tool_choice` asks for, and the JSON that answers are held to when a call is demanded."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.parsers.tool_facts import find_tool_name, schema_of_arguments, schema_of_calls, tool_name
from hardpoint.types.sampling_params import StructuredOutputsParams


class ToolMode(enum.Enum):
    """Whether an answer may, must or may not call a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True)
class ToolChoice:
    """A request's choice.

    named  the function that must be called, with NAMED
    """

    mode: ToolMode
    named: str = ""


def _part(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def choice_of(request: Any) -> ToolChoice:
    """The choice of a request; without tools there is none.

    Raises VLLMValidationError for a function that was not given.
    """
    choice = request.tool_choice
    if not request.tools or choice is None or choice == "none":
        return ToolChoice(ToolMode.NONE)
    if isinstance(choice, str):
        return ToolChoice(ToolMode(choice))
    name = _part(_part(choice, "function") or choice, "name")
    if not find_tool_name(request.tools, name):
        raise VLLMValidationError(f"tool_choice names {name!r}, which is not among the tools", parameter="tool_choice")
    return ToolChoice(ToolMode.NAMED, name)


def narrowed(request: Any) -> Any:
    """The request with the tools that an `allowed_tools` choice leaves, and the choice between them.

    Raises VLLMValidationError for an allowed tool that was not given.
    """
    allowed = _part(request.tool_choice, "allowed_tools") if not isinstance(request.tool_choice, str) else None
    if allowed is None:
        return request
    names = [tool_name(tool) for tool in _part(allowed, "tools")]
    missing = [name for name in names if not name or not find_tool_name(request.tools, name)]
    if missing:
        raise VLLMValidationError(
            f"tool_choice allows {missing[0]!r}, which is not among the tools", parameter="tool_choice"
        )
    left = [tool for tool in request.tools if tool_name(tool) in names]
    return request.model_copy(update={"tools": left, "tool_choice": _part(allowed, "mode") if left else "none"})


def constrain(request: Any) -> Any:
    """Hold the answer of a request that demands a call to the call's JSON; others are left as they are."""
    choice = choice_of(request)
    if choice.mode is ToolMode.REQUIRED:
        schema = schema_of_calls(request.tools, request.parallel_tool_calls is not False)
    elif choice.mode is ToolMode.NAMED:
        schema = next(schema_of_arguments(tool) for tool in request.tools if tool_name(tool) == choice.named)
    else:
        return request
    request.structured_outputs = StructuredOutputsParams(json=schema)
    request.response_format = None
    return request
