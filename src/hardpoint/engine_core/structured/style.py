"""White space and additional properties: what a request wishes, and what the server's settings say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hardpoint.contracts.structured_output import GrammarError, JsonStyle, StructuredOutputOptions

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

# Small models go on with white space for ever if they may; this is enough for ten levels of indentation.
MOST_WHITESPACE = 20
WHITESPACE = rf"[ \t\n]{{0,{MOST_WHITESPACE}}}"
_OF_JSON = (StructuredOutputOptions.JSON, StructuredOutputOptions.JSON_OBJECT)


def style_of_config(vllm_config: VllmConfig) -> JsonStyle:
    """The server's settings."""
    config = vllm_config.structured_outputs_config
    return JsonStyle(compact=config.disable_any_whitespace, closed=config.disable_additional_properties)


def united(request: JsonStyle, server: JsonStyle) -> JsonStyle:
    """A request's wishes with the server's: what either forbids is forbidden."""
    return JsonStyle(
        compact=request.compact or (server.compact and request.whitespace_pattern is None),
        closed=request.closed or server.closed,
        whitespace_pattern=request.whitespace_pattern,
    )


def check_json_style(style: JsonStyle, kind: StructuredOutputOptions) -> None:
    """Refuse a wish for white space where there is no JSON that it could concern."""
    if kind not in _OF_JSON and style.whitespace_pattern is not None:
        raise GrammarError(f"whitespace_pattern concerns JSON, not a {kind.name.lower()}")
