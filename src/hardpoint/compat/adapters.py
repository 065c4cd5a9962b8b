"""Small things vLLM has as names of a module and we have in another shape."""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hardpoint.compat.table import API_VERSION
from hardpoint.extensions.parser_files import import_parser_file
from hardpoint.extensions.points import group_row

DEFAULT_PLUGINS_GROUP = group_row("general").group
PLATFORM_PLUGINS_GROUP = group_row("platforms").group
STAT_LOGGER_PLUGINS_GROUP = group_row("stat_loggers").group
ENDPOINT_PLUGINS_GROUP = group_row("endpoints").group
IO_PROCESSOR_PLUGINS_GROUP = group_row("io_processors").group
LOGITSPROCS_GROUP = group_row("logits_processors").group

VERSION_TUPLE = tuple(int(part) for part in API_VERSION.split("."))


def random_tool_call_id() -> str:
    """A fresh tool-call id."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """A tool-call id in the form a model family expects."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else random_tool_call_id()


def extract_trace_context(headers: Mapping[str, str] | None) -> Any:
    """The OpenTelemetry context carried by request headers; None without headers or without OpenTelemetry."""
    try:
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - optional
            TraceContextTextMapPropagator,
        )
    except ImportError:
        return None
    return TraceContextTextMapPropagator().extract(headers) if headers else None


def get_tokenizer(
    tokenizer_name: str, *, tokenizer_mode: str = "auto", revision: str | None = None, download_dir: str | None = None
) -> Any:
    """The tokenizer of a model folder, a GGUF file, a catalogue name or a repository."""
    from hardpoint.config.engine_args import EngineArgs  # noqa: PLC0415 - only when asked for
    from hardpoint.front_end.tokenizers.loading import get_tokenizer as of_model  # noqa: PLC0415 - only when asked for

    args = EngineArgs(model=tokenizer_name, tokenizer_mode=tokenizer_mode, revision=revision, download_dir=download_dir)
    return of_model(args.create_engine_config().model_config)


def import_from_path(module_name: str, file_path: str) -> ModuleType:
    """Execute a Python file as a module of the given name."""
    spec = importlib.util.spec_from_file_location(module_name, file_path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module {module_name!r} in {file_path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def import_plugin(plugin_path: str) -> ModuleType:
    """Import the module or the file that registers parsers, once."""
    return import_parser_file(plugin_path, "tool_parsers")


def convert_ids_list_to_tokens(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """The text of each id by itself."""
    return [tokenizer.decode([token_id]) for token_id in token_ids]


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
