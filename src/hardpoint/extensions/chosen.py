"""Config hooks: import what a value names, in the form its row says, and refuse rows nothing reads yet."""

from __future__ import annotations

import importlib
import json
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.extensions.groups import resolve_logits_processors
from hardpoint.extensions.parser_files import import_parser_file
from hardpoint.extensions.points import config_hook_row
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname
from hardpoint.extensions.registry import planned_error
from hardpoint.extensions.rows import ConfigHook, Shape, State


def require_built_hook(key: str, value: Any) -> ConfigHook:
    """The row of a config hook; PlannedError naming the value if nothing in this version reads it."""
    row = config_hook_row(key)
    if row.state is State.PLANNED:
        raise planned_error(key, f"{row.flag} {value!r}", row.flag)
    return row


def check_choice(key: str, value: str) -> Any:
    """Import what the flag value names; errors name the reference, PlannedError as above.

    A word of ours, such as the name of a built-in executor, is returned as it is.
    """
    row = require_built_hook(key, value)
    if value in row.words.split():
        return value
    if row.shape in (Shape.DOTTED, Shape.DOTTED_OR_CLASS):
        return resolve_obj_by_qualname(value)
    if row.shape is Shape.COLON_OR_CLASS_LIST:
        return resolve_logits_processors([part for part in value.split(",") if part])
    if row.shape is Shape.COLON_BY_NAME:
        return {name: load_ref(ref) for name, ref in _json_object(row, value).items()}
    if row.shape is Shape.JSON:
        return _json_object(row, value)
    if row.shape is Shape.MODULE_OR_PATH:
        return import_parser_file(value, key.replace("_plugin", "s"))
    return importlib.import_module(value)


def _json_object(row: ConfigHook, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ConfigError(
            f"{row.flag} {value!r} is not JSON: {error}", code="flag-json", fix="give an object"
        ) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{row.flag} {value!r} is not a JSON object", code="flag-json", fix="write {...}")
    return parsed
