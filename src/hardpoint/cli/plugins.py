"""`hardpoint plugins list | why | doctor | new`: what can be extended, by what it is, what is wrong, how to begin."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hardpoint.cli.plugins_new import new_plugin
from hardpoint.extensions.diagnosis import Diagnosis, diagnose
from hardpoint.extensions.discovery import catalogue
from hardpoint.extensions.ledger import LedgerEntry
from hardpoint.extensions.listing import table_as_dict
from hardpoint.extensions.loading import POLICIES, set_policy
from hardpoint.extensions.patches import KEY as PATCHES
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, REGISTRIES
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import registry
from hardpoint.extensions.report import ROLES, BootReport, boot_in_child

CONFIG = "config"  # the ledger key of config fields
_OTHER_KEYS = (CONFIG, PATCHES, "plugin_config", "VLLM_PLUGINS")  # of the ledger, beside the table's
_MODEL_PARTS = ("models", "oot_ops", "pluggable_layers")  # what happens to these shows when a model is looked at
_MARKS = {"error": "ERROR", "warning": "WARNING", "note": "note"}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `plugins` command and its three sub-commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plugins", help="list extension points and plugins, explain one, find faults, begin one", description=__doc__
    )
    commands = parser.add_subparsers(dest="plugins_command", metavar="list|why|doctor|new", required=True)
    listing = commands.add_parser("list", help="groups, registries, hooks and what is installed; imports no plugin")
    why = commands.add_parser("why", help="what happened to one entry: boots every role and prints the ledger")
    why.add_argument("key", help="a key of `plugins list`, such as models or stat_loggers; or config")
    why.add_argument("name", help="the name of the entry, or the path of the field, such as parallel_config.worker_cls")
    doctor = commands.add_parser("doctor", help="boot every role and report what fails, with the fix")
    new = commands.add_parser("new", help="write a working package with a test, from the example of its kind")
    new.add_argument("key", help="what it extends: a key of `plugins list`, such as stat_loggers")
    new.add_argument("name", help="the name of the package, such as my-logger")
    new.add_argument("--path", type=Path, help="the folder to write; one called NAME here unless given")
    listing.add_argument("--json", action="store_true", help="print JSON")
    _add_hooks(doctor)
    for command in (why, doctor):
        _add_own_flags(command)
        rest = command.add_argument(
            "serve_flags",
            nargs=argparse.REMAINDER,
            metavar="MODEL ...",
            help="what `serve` would get: makes its config too",
        )
        rest.required = False  # argparse would name it among what is missing
    parser.set_defaults(run=run)
    return parser


def _add_hooks(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `serve` that hold nothing but the value of one config hook."""
    for row in CONFIG_HOOKS:
        if row.flag == "--" + row.key.replace("_", "-"):
            parser.add_argument(row.flag, dest=f"hook_{row.key}", help=f"check this value ({row.shape.value})")


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plugin-config", action="append", help="NAME.key=value, a plugin's own setting")
    parser.add_argument("--plugin-policy", choices=POLICIES, help="strict: every skip counts as a stop")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds each role may take (default 60)")


def _with_own_flags(args: argparse.Namespace) -> argparse.Namespace:
    """Take our own flags out of those of `serve`, among which they may stand in any order."""
    parser = argparse.ArgumentParser(prog=f"hardpoint plugins {args.plugins_command}", allow_abbrev=False)
    _add_own_flags(parser)
    defaults = vars(parser.parse_args([]))
    own, rest = parser.parse_known_args([word for word in args.serve_flags if word != "--"])
    for name, value in vars(own).items():
        if value != defaults[name]:
            before = getattr(args, name)
            setattr(args, name, [*(before or ()), *value] if isinstance(value, list) else value)
    args.serve_flags = rest
    return args


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-command; the exit status."""
    if args.plugins_command == "list":
        return _list(args.json)
    if args.plugins_command == "new":
        return _new(args)
    args = _with_own_flags(args)
    # Of a server's command line, what must be in force before plugins load; the children inherit it.
    settings = [word for given in args.plugin_config or () for word in ("--plugin-config", given)]
    load_ref("hardpoint.config.early_flags:apply_early_flags")([*args.serve_flags, *settings])
    if args.plugin_policy:
        set_policy(args.plugin_policy)
    return _why(args) if args.plugins_command == "why" else _doctor(args)


def _new(args: argparse.Namespace) -> int:
    folder = new_plugin(args.key, args.name, args.path)
    print(f"wrote {folder}")
    first = "" if importlib.util.find_spec("pytest") else f"{sys.executable} -m pip install pytest && "
    print(f"  test it:    {first}cd {folder} && {sys.executable} -m pytest")
    print(f"  install it: {sys.executable} -m pip install -e {folder}")
    return 0


def _list(as_json: bool) -> int:
    table = table_as_dict()
    if as_json:
        print(json.dumps(table, indent=2))
        return 0
    print(table["allowlist"])
    for remark in table["remarks"]:
        print(f"WARNING: {remark}")
    print("\nGroups (entry points of installed packages)")
    for group in table["groups"]:
        print(f"  {group['key']:<18} {group['group']:<26} {group['roles']}{_planned(group)}")
        for point in group["entries"]:
            package = "built in" if point["built_in"] else f"{point['distribution']} {point['version']}"
            verdict = "loads" if point["loads"] else f"left out: {point['why_not']}"
            print(f"      {point['name']} = {point['value']}  ({package})  {verdict}")
    print("\nRegistries (plugins add to them; built-in entries shown)")
    for one in table["registries"]:
        print(f"  {one['key']:<27} {', '.join(e['name'] for e in one['entries']) or '-'}{_planned(one)}")
    print("\nConfig hooks")
    for hook in table["config_hooks"]:
        print(f"  {hook['key']:<27} {hook['flag']:<32} {hook['format']}{_planned(hook)}")
    print("\nPlatform hooks (methods of the active platform)")
    for hook in table["platform_hooks"]:
        print(f"  {hook['key']:<34} {hook['moment']}{_planned(hook)}")
    return 0


def _planned(row: dict[str, Any]) -> str:
    return "  [planned]" if row["state"] == "planned" else ""


def _why(args: argparse.Namespace) -> int:
    key, name, as_json = args.key, args.name, args.json
    row_key = _row_key(key)
    if row_key is None:
        keys = [*_keys(), *_OTHER_KEYS]
        near = difflib.get_close_matches(key, keys, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"keys are: {', '.join(keys)}"
        print(f"there is no extension point {key!r}; {hint}", file=sys.stderr)
        return 2
    flags = args.serve_flags if args.serve_flags or row_key == CONFIG else None
    reports = _boot_all(args.timeout, {}, flags, look_at_models=row_key in _MODEL_PARTS)
    entries = [entry for report in reports for entry in report.entries if entry.key == row_key]
    events = [entry for entry in entries if entry.name == name]
    built_in = _built_in(row_key, name)
    if as_json:
        print(json.dumps({"key": row_key, "name": name, "built_in": built_in, "events": [e.to_dict() for e in events]}))
        return 0 if events or built_in else 1
    if built_in:
        print(f"{row_key} {name}: built in, {built_in}")
    for role in dict.fromkeys(entry.role for entry in events):
        print(f"{role}:")
        for entry in events:
            if entry.role == role:
                print(f"  {_event(entry)}")
    if not events and not built_in:
        for stop in (stop for report in reports for stop in report.stops):
            print(f"ERROR: {stop['what']}", file=sys.stderr)
        known = sorted({entry.name for entry in entries} | set(_built_in_names(row_key)))
        near = difflib.get_close_matches(name, known, n=3) or known[:20]
        print(f"nothing is known of {row_key} {name!r}; there are: {', '.join(near) or 'none'}", file=sys.stderr)
        return 1
    return 0


def _event(entry: LedgerEntry) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(entry.time))
    took = f" {entry.duration_s * 1000:.0f} ms" if entry.duration_s is not None else ""
    who = f" [{entry.origin.label}]" if entry.origin is not None else ""
    return f"{clock} {entry.kind:<9}{took} {entry.detail}{who}".rstrip()


def _keys() -> list[str]:
    return list(dict.fromkeys(row.key for row in (*GROUPS, *REGISTRIES, *CONFIG_HOOKS)))


def _row_key(key: str) -> str | None:
    by_group = {row.group: row.key for row in GROUPS}
    known = by_group.get(key, key)
    return known if known in [*_keys(), *_OTHER_KEYS] else None


def _built_in_names(key: str) -> dict[str, str]:
    if key in [row.key for row in REGISTRIES]:
        return {entry.name: entry.target for entry in registry(key).entries() if entry.built_in}
    found = [f for row in GROUPS if row.key == key for f in catalogue.group(row.group)]
    return {f.name: f.value for f in found if f.built_in}


def _built_in(key: str, name: str) -> str:
    return _built_in_names(key).get(name, "")


def _doctor(args: argparse.Namespace) -> int:
    reports = _boot_all(args.timeout, _choices(args), _serve_line(args.serve_flags), look_at_models=True)
    found = diagnose(reports, args.timeout)
    bad = any(one.severity != "note" for one in found)
    if args.json:
        print(json.dumps({"healthy": not bad, "roles": _times(reports), "findings": [one.to_dict() for one in found]}))
        return int(bad)
    print("booted " + ", ".join(f"{role} ({seconds:.2f} s)" for role, seconds in _times(reports).items()))
    for line in _lines(found):
        print(line)
    if not bad:
        print("no fault found")
    return int(bad)


def _serve_line(words: list[str]) -> list[str] | None:
    """The words to make a configuration of: none without a model, as the default one may have to be fetched."""
    has_model = "--model" in words or (words and not words[0].startswith("-"))
    return words if has_model else None


def _choices(args: argparse.Namespace) -> dict[str, str]:
    """The config hooks that are given a value, before the model or among the flags after it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_hooks(parser)
    words = args.serve_flags
    spelled = ["--" + word[2:].replace("_", "-") if word.startswith("--") else word for word in words]
    given = {name: value for name, value in vars(args).items() if value}
    values = {**vars(parser.parse_known_args(spelled)[0]), **given}
    return {name.removeprefix("hook_"): value for name, value in values.items() if name.startswith("hook_") and value}


def _times(reports: Iterable[BootReport]) -> dict[str, float]:
    return {report.role: round(report.seconds, 3) for report in reports}


def _lines(found: list[Diagnosis]) -> list[str]:
    return [f"{_MARKS[one.severity]}: {one.what} ({', '.join(one.roles)}). Fix: {one.fix}" for one in found]


def _boot_all(
    timeout_s: float, choices: dict[str, str], serve_flags: list[str] | None, *, look_at_models: bool = False
) -> list[BootReport]:
    def boot(role: str) -> BootReport:
        return boot_in_child(
            role, choices=choices, serve_flags=serve_flags, timeout_s=timeout_s, look_at_models=look_at_models
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(boot, ROLES))
