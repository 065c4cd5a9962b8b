"""`hardpoint plugins new KEY NAME`: a working package with a test, copied from the example of its extension point."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, REGISTRIES
from hardpoint.extensions.rows import State
from hardpoint.extensions.typed_values import near_miss

_HERE = Path(__file__).resolve().parent
_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_TEXT = {".py", ".toml", ".md"}


def examples() -> Path:
    """The folder of examples: beside us in a wheel, in the repository otherwise."""
    for folder in (_HERE.parent / "example_plugins", _HERE.parents[2] / "examples" / "plugins"):
        if (folder / "general" / "pyproject.toml").is_file():
            return folder
    raise HardpointError(
        "the example plugins are missing from this installation", code="examples", fix="install Hardpoint again"
    )


def keys() -> list[str]:
    """The extension points that have an example, in the order of the table."""
    there = {folder.name for folder in examples().iterdir()}
    return list(dict.fromkeys(row.key for row in (*GROUPS, *REGISTRIES, *CONFIG_HOOKS) if row.key in there))


def new_plugin(key: str, name: str, path: Path | None = None) -> Path:
    """Write the package `name` for the extension point `key` into a new folder, and return that.

    path  the folder; one called `name` in the current folder unless given
    Raises ConfigError for a key without an example, a name that cannot be one, or a folder that is there.
    """
    source = examples() / _known(key)
    module = _module(name)
    target = path if path is not None else Path.cwd() / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already", code="flag", fix="choose another name or --path")
    words = _words(source.name, name, module)
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        if file.suffix not in _TEXT or not file.is_file():
            continue
        new = target / _replaced(str(relative), words)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(_replaced(file.read_text(encoding="utf-8"), words), encoding="utf-8")
    return target


def _known(key: str) -> str:
    """The example's folder for a key or an entry-point group's name."""
    by_group = {row.group: row.key for row in GROUPS}
    wanted, there = by_group.get(key, key), keys()
    if wanted in there:
        return wanted
    planned = {row.key for row in REGISTRIES if row.state is State.PLANNED}
    if wanted in planned:
        raise ConfigError(f"this version does not have {wanted} yet", code="flag", fix=f"there are: {', '.join(there)}")
    raise ConfigError(
        f"there is no extension point {key!r}{near_miss(key, there)}", code="flag", fix=f"there are: {', '.join(there)}"
    )


def _module(name: str) -> str:
    """The module's name for a distribution's; ConfigError where it cannot be one or belongs to somebody else."""
    module = re.sub(r"[-.]+", "_", name).lower()
    if not _NAME.fullmatch(name) or not module.isidentifier():
        raise ConfigError(f"{name!r} cannot be the name of a package", code="flag", fix="write it as my-plugin")
    there = importlib.util.find_spec(module)
    # A folder that merely has the name is no module of anybody's.
    if module in sys.stdlib_module_names or (there is not None and there.origin is not None):
        raise ConfigError(
            f"there is a module {module!r} already, which the new package would hide",
            code="flag",
            fix=f"choose another name, such as {name}-plugin",
        )
    return module


def _words(key: str, name: str, module: str) -> list[tuple[str, str]]:
    """What the example's names become; longer ones first."""
    camel = "".join(part[:1].upper() + part[1:] for part in module.split("_") if part)
    return [
        (f"acme-{key.replace('_', '-')}", name),
        (f"acme_{key}", module),
        ("ACME", module.upper()),
        ("Acme", camel),
        ("acme", module),
    ]


def _replaced(text: str, words: list[tuple[str, str]]) -> str:
    found = re.compile("|".join(re.escape(old) for old, _ in words))
    new = dict(words)
    return found.sub(lambda match: new[match[0]], text)
