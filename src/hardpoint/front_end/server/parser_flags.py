"""The parsers that the flags name, chosen where a server starts: what is wrong with them is an error of the start."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.front_end.parsers.answers import Parsers
from hardpoint.front_end.server.settings import ServerSettings


def check_parsers(args: Namespace) -> None:
    """Find parsers that cannot be used before the model is loaded for nothing."""
    settings = ServerSettings.from_args(args)
    _tools(settings, None)
    choose_parser(
        "reasoning_parsers", getattr(args, "reasoning_parser", None), getattr(args, "reasoning_parser_plugin", None)
    )


def chosen_parsers(settings: ServerSettings, vllm_config: Any, tokenizer: Any) -> Parsers:
    """What a server reads answers with; without a tokenizer nothing is read."""
    chosen = vllm_config.structured_outputs_config
    name, plugin = getattr(chosen, "reasoning_parser", ""), getattr(chosen, "reasoning_parser_plugin", "")
    reasoning = choose_parser("reasoning_parsers", name, plugin)
    return _tools(settings, tokenizer, model_config=vllm_config.model_config, reasoning_name=name,
                  reasoning_class=reasoning)  # fmt: skip


def _tools(settings: ServerSettings, tokenizer: Any, **more: Any) -> Parsers:
    found = choose_parser("tool_parsers", settings.tool_call_parser, settings.tool_parser_plugin)
    return Parsers(
        tokenizer=tokenizer,
        tool_name=settings.tool_call_parser or "",
        tool_class=found,
        auto=settings.enable_auto_tool_choice,
        **more,
    )
