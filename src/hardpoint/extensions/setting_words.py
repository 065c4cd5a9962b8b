"""Settings of plugins on their way: `NAME.key=value` words, in one environment variable, as nested values.

`NAME.key=text` is as somebody typed it: what it means depends on the type the plugin declares. `NAME.key:=json`
is a value that has its type already, such as one from a file or a script.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.extensions.typed_values import Text, guess

VARIABLE = "HARDPOINT_PLUGIN_CONFIG"
# Linux refuses to start a process with a variable of 128 KiB.
MAX_BYTES = 64 << 10
NAME = re.compile(r"[A-Za-z0-9_-]+")


class PluginConfigError(ConfigError):
    """Settings that a plugin cannot have: the user's mistake, so it stops the start whatever the plugin's row says."""


def words_of(given: Any) -> list[str]:
    """`NAME.key=value` words from such words, JSON objects or {NAME: {key: value}}. Raises PluginConfigError."""
    if isinstance(given, Mapping):
        return [word for name, own in given.items() for word in _section_words(str(name), own)]
    if isinstance(given, str):
        return words_of([given])
    words: list[str] = []
    for word in given or ():
        if isinstance(word, str) and word.lstrip().startswith("{"):
            words += words_of(_object(word))
            continue
        path, equals, text = str(word).partition("=")
        name, dot, key = path.removesuffix(":").partition(".")
        if not (isinstance(word, str) and equals and dot and NAME.fullmatch(name) and all(key.split("."))):
            raise _malformed(f"{word!r}")
        if path.endswith(":"):
            _json(word, text)
        words.append(word)
    return words


def _section_words(name: str, own: Any) -> list[str]:
    if not isinstance(own, Mapping):
        raise _malformed(f"{name}: {own!r}")
    try:
        return [f"{name}.{key}:={json.dumps(value)}" for key, value in own.items()]
    except (TypeError, ValueError) as error:
        raise PluginConfigError(
            f"the settings of plugin {name!r} cannot be sent to other processes: {error}",
            code="plugin-config",
            fix="use numbers, strings, lists and dicts",
        ) from None


def _object(text: str) -> Mapping[str, Any]:
    found = _json(text, text)
    if not isinstance(found, dict):
        raise _malformed(repr(text))
    return found


def _json(word: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PluginConfigError(f"--plugin-config {word!r} is not JSON: {error}", code="flag") from None


def _malformed(shown: str) -> PluginConfigError:
    return PluginConfigError(
        f"--plugin-config {shown}: expected NAME.key=value", code="flag", fix="such as acme.threshold=0.5"
    )


def export(words: Sequence[str]) -> None:
    """Put words into the environment, for this process and its children. Raises PluginConfigError."""
    nested(words)  # says what cannot be said together
    # Of equal words the last stays: a later value wins.
    text = json.dumps(list(dict.fromkeys(reversed(words)))[::-1])
    if len(text.encode()) > MAX_BYTES:
        raise PluginConfigError(
            f"the settings of all plugins take {len(text.encode())} bytes, more than {MAX_BYTES}",
            code="plugin-config",
            fix="put what is large into a file of its own and give its path",
        )
    os.environ[VARIABLE] = text


def words_in_environment() -> list[str]:
    """The words that this process was given or has exported. Raises PluginConfigError."""
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return []
    try:
        return words_of(json.loads(text))
    except (ValueError, TypeError) as error:
        what = error.what if isinstance(error, PluginConfigError) else str(error)
        raise PluginConfigError(
            f"environment variable {VARIABLE} cannot be read: {what}",
            code="env-value",
            fix='set it to JSON such as {"acme": {"threshold": 0.5}}',
        ) from None


def nested(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Plugin to key to value, keys with dots as dicts in dicts; of two values for a key the last one.

    Raises PluginConfigError where a key has both a value and keys below it.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        path, _, text = word.partition("=")
        name, _, key = path.removesuffix(":").partition(".")
        *outer, last = key.split(".")
        own = found.setdefault(name, {})
        for part in outer:
            own[part] = own = guess(own.get(part, {}))
            if not isinstance(own, dict):
                raise PluginConfigError(f"--plugin-config {word!r}: {part} has a value already", code="flag")
        own[last] = _json(word, text) if path.endswith(":") else Text(text)
    return found
