"""What the text of any flag must be: a text that says something, a number within the bounds of its field."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from hardpoint.config.flags import Flag
from hardpoint.config.sections import VllmConfig
from hardpoint.config.sections.base import broken_rule, field_types, section_type


def text_of(flag: Flag) -> Callable[[str], str]:
    """The parser of a flag's text, which is empty only where that is the default: else a shell's variable was."""

    def parse(text: str) -> str:
        if not text and flag.default != "":
            raise argparse.ArgumentTypeError(f"{flag.names[0]} is an empty text; leave it out instead")
        if "\0" in text:
            raise argparse.ArgumentTypeError(f"{text!r} holds a NUL character")
        return text

    return parse


def number_of(flag: Flag, parse_number: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser of a flag's number: what `parse_number` makes of its text, within the bounds of the flag's field."""

    def parse(text: str) -> Any:
        number, kind = parse_number(text), _kind_of(flag.field)
        rule = None if kind is None else broken_rule(number, kind)
        if rule is not None:
            raise argparse.ArgumentTypeError(f"{number} is out of range: {rule}")
        return number

    return parse


def _kind_of(field: str) -> Any:
    """The type of a field, by its path in the configuration; None for no path."""
    kind: Any = VllmConfig
    for name in filter(None, field.split(".")):
        section: Any = section_type(kind)
        kind = field_types(section).get(name)
    return None if kind is VllmConfig else kind
