"""The command-line parser: argparse with vLLM's conveniences.

Dashes and underscores are alike, `--no-x` turns a switch off, `-O2` is a level, sizes take k, M and so on,
JSON flags take dotted parts (`--compilation-config.mode 0`, `--cfg.list+ item`), `--config file.yaml`
holds flags, and an unknown flag is an error with the nearest known one.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from hardpoint.config.connectors import check_connector
from hardpoint.config.flag_values import number_of, text_of
from hardpoint.config.flags import (
    BOOL,
    CSV,
    EACH,
    FLOAT,
    INT,
    INTS,
    JSON,
    JSONLIST,
    SIZE,
    STR,
    WORDS,
    Flag,
    Whole,
    reason,
)
from hardpoint.config.sections import Section, near_miss
from hardpoint.errors import ConfigError, RegistrationError
from hardpoint.extensions.declared_settings import SettingFlag
from hardpoint.extensions.plugin_config import setting_flags
from hardpoint.extensions.setting_words import words_of
from hardpoint.extensions.typed_values import ValueProblem, in_words

# Bounds of each number of a list: a field has those of the list only.
_COUNTS = Whole(1, 65536)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)([kKmMgGtT])?$")
_DOTTED = re.compile(r"^(--?[A-Za-z][\w-]*)\.([\w.-]+)(\+?)(?:=(.*))?$", re.DOTALL)
MAX_CONFIG_BYTES = 4 << 20
_LARGEST = 2**31 - 1


class FlagError(ConfigError):
    """A command line that cannot be understood."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """The parser, under the name that plugins for vLLM know. Errors are `FlagError`s in our own parsers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", GroupedHelp)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the conveniences are unfolded first."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(unfold(self, words), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a whole command line; an unknown flag is an error with the nearest known one."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest[0]))
        return found

    def _unknown(self, word: str) -> str:
        name = word.split("=")[0]
        if not name.startswith("-"):
            return f"unexpected argument {word!r}"
        known = [option for option in self._option_string_actions if option.startswith("--")]
        return f"unknown flag {name}{near_miss(name, known)}"

    def error(self, message: str) -> NoReturn:
        """Raise `FlagError` with one line."""
        raise FlagError(message, code="flag", fix=f"see {self.prog} --help")


class GroupedHelp(argparse.HelpFormatter):
    """Help with room for long flags and no metavar repeated per alias."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=None)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, Switch):
            return action.shown()
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


# -- from the table to argparse ----------------------------------------------------------------------


def add_flag(group: Any, flag: Flag) -> None:
    """Add one row of the table. A refused row is parsed, to be refused by name, and hidden from the help."""
    options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": _help(flag)}
    if flag.why and not flag.only:
        options["help"] = argparse.SUPPRESS
    group.add_argument(*flag.names, **options, **_kind_options(flag))


def _help(flag: Flag) -> str:
    text = flag.help.replace("%", "%%")
    shown = flag.default not in (None, "", [], {}, False) and flag.kind != BOOL and "default" not in flag.help
    if shown:
        default = " ".join(flag.default) if isinstance(flag.default, list) else flag.default
        text += f" (default {default})".replace("%", "%%")
    return text


def _kind_options(flag: Flag) -> dict[str, Any]:
    kind = flag.kind
    if isinstance(kind, tuple):
        return {"type": str, "choices": kind, "metavar": "{" + ",".join(kind) + "}"}
    if isinstance(kind, type):
        return {"type": parse_json, "metavar": "JSON"}
    if isinstance(kind, Whole):
        return {"type": _bounded(kind), "metavar": "N"}
    if kind == BOOL:
        return {"action": Switch, "off": flag.default is False}
    if flag.dest == "hf_token":
        return {"type": str, "nargs": "?", "const": True, "metavar": "TOKEN"}
    word = flag.dest.split("_")[-1].upper()
    simple: dict[str, dict[str, Any]] = {
        STR: {"type": text_of(flag), "metavar": word},
        INT: {"type": number_of(flag, _integer), "metavar": "N"},
        SIZE: {"type": number_of(flag, parse_size), "metavar": "N"},
        FLOAT: {"type": number_of(flag, _number), "metavar": "X"},
        JSON: {"type": parse_object, "metavar": "JSON"},
        JSONLIST: {"type": parse_list, "metavar": "JSON"},
        CSV: {"type": _commas, "metavar": "A,B"},
        WORDS: {"type": text_of(flag), "nargs": "+", "action": Extend, "metavar": word},
        INTS: {"type": _bounded(_COUNTS), "nargs": "+", "action": Extend, "metavar": "N"},
        EACH: {"type": text_of(flag), "action": Collect, "metavar": word},
    }
    return simple[kind]


class Switch(argparse.BooleanOptionalAction):
    """`--x` and `--no-x`; a short alias has no negative form."""

    def __init__(self, option_strings: Sequence[str], dest: str, off: bool = False, **kwargs: Any) -> None:
        super().__init__([name for name in option_strings if name.startswith("--")], dest, **kwargs)
        # Whether leaving it out means off, so that the negative form need not be shown.
        self.off = off
        self.option_strings = [*self.option_strings, *(n for n in option_strings if not n.startswith("--"))]

    def shown(self) -> str:
        """How the help spells it."""
        names = [name for name in self.option_strings if not name.startswith("--no-")]
        return ", ".join(name if self.off else name.replace("--", "--[no-]", 1) for name in names)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Set the switch by the form in which it was given."""
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


class Extend(argparse.Action):
    """Words of several occurrences in one list, which starts empty rather than with the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Add to what this command line gave so far."""
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])


class Collect(argparse.Action):
    """One word per occurrence."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Add to what this command line gave so far."""
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), values])


# -- flags of plugins ---------------------------------------------------------------------------------


def add_plugin_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the plugins of this process declared for their settings, a group for each plugin.

    Raises RegistrationError naming the plugin whose flag is taken.
    """
    groups: dict[str, Any] = {}
    for one in setting_flags():
        group = groups.get(one.plugin)
        if group is None:
            group = groups[one.plugin] = parser.add_argument_group(f"Plugin {one.plugin} ({one.origin.label})")
        help_text = _plugin_help(one).replace("%", "%%")
        options: dict[str, Any] = {"dest": one.dest, "default": argparse.SUPPRESS, "help": help_text}
        if one.kind is bool:
            options.update(action=Switch, off=one.default is False)
        else:
            options.update(type=_checked_by(one), metavar=one.field.split("_")[-1].upper())
        try:
            group.add_argument(one.flag, **options)
        except argparse.ArgumentError:
            raise RegistrationError(
                f"plugin {one.plugin!r} declares the flag {one.flag}, which `serve` has already",
                code="plugin-config",
                origin=one.origin.label,
                fix="choose another flag in the call of declare()",
            ) from None


def _plugin_help(one: SettingFlag) -> str:
    kind = f"{one.help}: {in_words(one.kind)}" if one.help else in_words(one.kind)
    return kind if one.default in (None, "", False) else f"{kind} (default {one.default})"


def _checked_by(one: SettingFlag) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            one.check(text)
        except ValueProblem as problem:
            raise argparse.ArgumentTypeError(problem.what) from None
        return text

    return check


def plugin_words(args: argparse.Namespace) -> list[str]:
    """What parsed arguments hold for plugins' settings, as `--plugin-config` takes it; their own flags win."""
    flags = [one.word(getattr(args, one.dest)) for one in setting_flags() if hasattr(args, one.dest)]
    return [*(getattr(args, "plugin_config", None) or ()), *flags]


# -- values ------------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """`8k` is 8000, `8K` is 8192, `1.5M`; `auto` and `-1` are -1."""
    if text.lower() in ("auto", "-1"):
        return -1
    found = _SIZE.match(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 8k or 20G")
    number = float(found[1]) * _UNITS.get(found[2] or "", 1)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _bounded(bounds: Whole) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number, most = _integer(text), bounds.most or _LARGEST
        if not bounds.least <= number <= most:
            limit = f"{bounds.least} to {most}" if bounds.most or number > most else f"at least {bounds.least}"
            raise argparse.ArgumentTypeError(f"{number} is out of range: expected {limit}")
        return number

    return parse


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number


def parse_json(text: str) -> Any:
    """Parse the JSON of a flag. A bare number or word stays what it is, e.g. a compilation mode."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {problem}") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def parse_object(text: str) -> dict[str, Any]:
    """Parse the JSON object of a flag."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def parse_list(text: str) -> list[Any]:
    """Parse a JSON list; a bare word is a list of one."""
    if not text.lstrip().startswith(("[", "{")):
        return [text]
    found = parse_json(text)
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of strings")
    return found


def _commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


# -- conveniences ------------------------------------------------------------------------------------


def unfold(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Rewrite a command line into what argparse knows."""
    plain, parts = _split_dotted(parser, _insert_config(parser, words))
    wholes = {option: _take_json(parser, option, plain) for option in dict.fromkeys(part.option for part in parts)}
    for part in parts:
        _put(parser, wholes[part.option], part)
    return [*(f"{option}={json.dumps(whole)}" for option, whole in wholes.items()), *plain]


class _Part(NamedTuple):
    """`--option.key.key value`, with `+` at the end to append."""

    word: str
    option: str
    keys: list[str]
    value: Any
    append: bool


def _split_dotted(parser: argparse.ArgumentParser, words: list[str]) -> tuple[list[str], list[_Part]]:
    plain: list[str] = []
    parts: list[_Part] = []
    queue = iter(words)
    for word in queue:
        if word == "--":
            return [*plain, word, *queue], parts
        match = _DOTTED.match(word)
        option = _canonical(parser, match[1]) if match else ""
        if match is None or option not in parser._option_string_actions:
            plain.append(_spell(word))
            continue
        text = match[4] if match[4] is not None else next(queue, None)
        if text is None:
            parser.error(f"{word} expects a value")
        if isinstance(parser._option_string_actions[option], Collect):
            plain.append(f"{option}={match[2]}={text}")
            continue
        parts.append(_Part(word, option, match[2].split("."), _guess(text), bool(match[3])))
    return plain, parts


def _canonical(parser: argparse.ArgumentParser, name: str) -> str:
    """Spell a flag with dashes, and by its first name if it is an alias."""
    spelled = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    action = parser._option_string_actions.get(spelled)
    return action.option_strings[0] if action is not None and action.option_strings else spelled


def _spell(word: str) -> str:
    if re.fullmatch(r"-O[0-3]", word):
        return f"--optimization-level={word[2]}"
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("_", "-") + equals + value


def _take_json(parser: argparse.ArgumentParser, option: str, plain: list[str]) -> dict[str, Any]:
    """Remove every `option JSON` from the words and return the last one's object."""
    names = parser._option_string_actions[option].option_strings
    found: Any = {}
    places = [index for index, word in enumerate(plain) if word.partition("=")[0] in names]
    for index in reversed(places):
        _, equals, text = plain[index].partition("=")
        last = index == places[-1]
        if not equals:
            text = plain.pop(index + 1) if index + 1 < len(plain) else ""
        del plain[index]
        if last:
            found = _object(parser, option, text)
    return found


def _object(parser: argparse.ArgumentParser, option: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as problem:
        parser.error(f"{option}: {text!r} is not JSON: {problem}")
    if not isinstance(found, dict):
        parser.error(f"{option} {text} and {option}.key cannot be combined")
    return found


def _put(parser: argparse.ArgumentParser, whole: dict[str, Any], part: _Part) -> None:
    *outer, last = part.keys
    for key in outer:
        whole = whole.setdefault(key, {})
        if not isinstance(whole, dict):
            parser.error(f"{part.word}: {key} already has a value that is not an object")
    if not part.append:
        whole[last] = part.value
        return
    items = whole.setdefault(last, [])
    if not isinstance(items, list):
        parser.error(f"{part.word}: {last} already has a value that is not a list")
    items += part.value if isinstance(part.value, list) else [part.value]


def _guess(text: str) -> Any:
    """JSON where it is JSON, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _insert_config(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Put the flags of `--config file.yaml` before those of the command line, which therefore win."""
    places = [i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")]
    if not places or "--config" in parser._option_string_actions:
        return words
    if len(places) > 1:
        parser.error("--config may be given once")
    (place,) = places
    _, equals, name = words[place].partition("=")
    if not equals and place + 1 >= len(words):
        parser.error("--config expects a file")
    name = name if equals else words[place + 1]
    rest = words[:place] + words[place + (1 if equals else 2) :]
    return _merge(parser, read_config(Path(name)), rest)


def _merge(parser: argparse.ArgumentParser, values: dict[str, Any], rest: list[str]) -> list[str]:
    """Words for the file's values, then the command line's. A model in the file gives way to one on the line."""
    values = dict(values)
    model = values.pop("model", values.pop("model_tag", None))
    given = {_canonical(parser, word.split("=")[0].split(".")[0]) for word in rest if word.startswith("-")}
    has_model = bool(rest) and not rest[0].startswith("-")
    words: list[str] = [] if has_model or model is None or "--model" in given else [str(model)]
    for key, value in values.items():
        words += _as_words(parser, str(key), value, given)
    return [*rest[:1], *words, *rest[1:]] if has_model else [*words, *rest]


def _as_words(parser: argparse.ArgumentParser, key: str, value: Any, given: set[str]) -> list[str]:
    name = _canonical(parser, "--" + key)
    if value is None:
        return []
    if isinstance(value, bool):
        return [name] if value else ["--no-" + name[2:]]
    action = parser._option_string_actions.get(name)
    if name == "--plugin-config":
        return [f"{name}={word}" for word in words_of(value)]
    if isinstance(action, (Extend, Collect)):
        # Lists are replaced by the command line, not added to.
        items = value if isinstance(value, list) else [value]
        return [] if name in given else [f"{name}={item}" for item in items]
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    if isinstance(value, list) and action is not None and action.type is _commas:
        text = ",".join(str(item) for item in value)
    return [f"{name}={text}"]


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file of flags: `port: 8001`, lists, and objects for JSON flags."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise FlagError(f"--config {path} is larger than {MAX_CONFIG_BYTES >> 20} MiB", code="flag-config")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        text = getattr(problem, "strerror", None) or str(problem)
        raise FlagError(f"--config {path} cannot be read: {text}", code="flag-config") from None
    except yaml.YAMLError as problem:
        line = " ".join(str(problem).split())
        raise FlagError(f"--config {path} is not YAML: {line}", code="flag-config") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise FlagError(f"--config {path} holds no mapping of flags to values", code="flag-config")
    return {str(key): value for key, value in found.items()}


def refuse(flag: Flag, value: Any, shown: str) -> None:
    """Raise `FlagError` if the table says that this value of the flag is not to be had."""
    if not flag.allows(value) and not isinstance(value, Section):
        check_connector(flag.dest, value)
        raise FlagError(f"{shown} is refused: {reason(flag)}", code="flag-refused", fix="leave it out")


def check_refused(flags: Sequence[Flag], namespace: argparse.Namespace) -> None:
    """Refuse every parsed flag that cannot be honoured, and fill in the defaults of the others."""
    for flag in flags:
        if hasattr(namespace, flag.dest):
            refuse(flag, getattr(namespace, flag.dest), flag.names[0])
        else:
            setattr(namespace, flag.dest, copy.deepcopy(flag.default))
