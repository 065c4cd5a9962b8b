"""A request's constraint in the terms of backends, and the key under which its grammar is remembered."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hardpoint.contracts.structured_output import JsonStyle, StructuredOutputOptions
from hardpoint.types.sampling_params import SamplingParams, StructuredOutputsParams

PLAIN = JsonStyle()


@dataclass(frozen=True)
class Constraint:
    """What is compiled: equal constraints have equal grammars.

    spec            as `StructuredOutputOptions` says for the kind
    stop_token_ids  what ends the output where it is complete, in order
    """

    kind: StructuredOutputOptions
    spec: str
    stop_token_ids: tuple[int, ...]
    style: JsonStyle = PLAIN

    @property
    def style_fields(self) -> dict[str, Any] | None:
        """The style for a message; None when the request wishes nothing."""
        return None if self.style == PLAIN else asdict(self.style)

    @property
    def word(self) -> str:
        """The parameter that the client used."""
        return self.kind.name.lower()


def constraint_of(params: SamplingParams) -> Constraint:
    """The constraint of a request that has one."""
    asked = params.structured_outputs
    assert asked is not None
    kind, spec = _kind_and_spec(asked)
    style = JsonStyle(asked.disable_any_whitespace, asked.disable_additional_properties, asked.whitespace_pattern)
    return Constraint(kind, spec, tuple(sorted(params.all_stop_token_ids)), style)


def _kind_and_spec(asked: StructuredOutputsParams) -> tuple[StructuredOutputOptions, str]:
    options = StructuredOutputOptions
    if asked.json is not None:
        return options.JSON, asked.json if isinstance(asked.json, str) else json.dumps(asked.json)
    if asked.json_object:
        return options.JSON_OBJECT, ""
    if asked.regex is not None:
        return options.REGEX, asked.regex
    if asked.choice is not None:
        return options.CHOICE, json.dumps(asked.choice, ensure_ascii=False)
    if asked.grammar is not None:
        return options.GRAMMAR, asked.grammar
    assert asked.structural_tag is not None
    return options.STRUCTURAL_TAG, asked.structural_tag
