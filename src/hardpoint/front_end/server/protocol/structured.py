"""The ways in which a body asks for structured output, as the engine's `StructuredOutputsParams`."""

from __future__ import annotations

import json
from typing import Any

from hardpoint.errors import VLLMValidationError
from hardpoint.types.sampling_params import StructuredOutputsParams

# Names from before `structured_outputs`, and what became of them.
_OLDER = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_BACKEND = "guided_decoding_backend"


def with_older_names(data: Any) -> Any:
    """A body whose older fields have become parts of `structured_outputs`.

    Raises VLLMValidationError for a value given in both forms, and for a backend: that is the server's choice.
    """
    if not isinstance(data, dict) or not any(name.startswith("guided_") for name in data if isinstance(name, str)):
        return data
    data = dict(data)
    if data.pop(_BACKEND, None) not in (None, "auto"):
        raise VLLMValidationError(
            f"{_BACKEND} is the server's choice (--structured-outputs-config.backend)", parameter=_BACKEND
        )
    given = {name: data.pop(name) for name in _OLDER if name in data}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        merged = data.get("structured_outputs") or {}
        for name, value in given.items():
            if not isinstance(merged, dict) or merged.get(_OLDER[name]) is not None:
                raise VLLMValidationError(f"{name} and structured_outputs say different things", parameter=name)
            merged = {**merged, _OLDER[name]: value}
        data["structured_outputs"] = merged
    return data


def structured_outputs_of(
    structured_outputs: dict[str, Any] | StructuredOutputsParams | None, response_format: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """The constraint of a body; None when it has none. Raises VLLMValidationError naming the field."""
    formatted = _of_response_format(response_format) if response_format is not None else None
    if isinstance(structured_outputs, StructuredOutputsParams):
        return structured_outputs  # made by a parser that demands a tool call
    if structured_outputs is None:
        return StructuredOutputsParams(**formatted) if formatted is not None else None
    unknown = sorted(set(structured_outputs) - set(StructuredOutputsParams.__struct_fields__))
    if unknown:
        raise VLLMValidationError(
            f"structured_outputs has no field {unknown[0][:64]!r}", parameter="structured_outputs"
        )
    given = {name: value for name, value in structured_outputs.items() if value is not None}
    return StructuredOutputsParams(**{**(formatted or {}), **given})


def constraint_name(request: Any) -> dict[str, str]:
    """What a request calls its constraint, in which refusals of the engine are told."""
    own = request.structured_outputs is None and request.response_format is not None
    return {"structured_outputs": "response_format"} if own else {}


def _of_response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": _schema_of(form)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    raise VLLMValidationError(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got {kind!r}",
        parameter="response_format",
    )


def _schema_of(form: dict[str, Any]) -> dict[str, Any]:
    described = form.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise VLLMValidationError(
            "response_format of type json_schema needs json_schema.schema, an object",
            parameter="response_format.json_schema",
        )
    # The empty schema is any JSON value; written so that it is not taken for none at all.
    return schema or {"description": "any value"}
