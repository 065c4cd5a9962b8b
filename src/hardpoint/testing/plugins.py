"""Plugins from source text, found by a fresh interpreter without being installed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plugin:
    """A folder that holds a module or package and its metadata; put it on PYTHONPATH."""

    folder: Path
    name: str
    version: str

    def environment(self, *others: Plugin, **variables: str) -> dict[str, str]:
        """The process environment with this plugin, and the others after it, on PYTHONPATH."""
        return plugin_environment([self, *others], **variables)


def plugin_environment(plugins: Iterable[Plugin], **variables: str) -> dict[str, str]:
    """The process environment with these plugins' folders, in order, on PYTHONPATH."""
    folders = dict.fromkeys(str(plugin.folder) for plugin in plugins)
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def make_plugin(
    folder: Path,
    name: str,
    source: str | Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    version: str = "1.0",
) -> Plugin:
    """Write a plugin distribution called `name` into `folder`.

    source        text of the module `name` (with - as _), or path -> text for several files
    entry_points  group -> entry-point name -> "module:attribute"
    """
    module = name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{module}.py": source} if isinstance(source, str) else source
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(_entry_points_text(entry_points or {}), encoding="utf-8")
    return Plugin(folder, name, version)


def _entry_points_text(groups: Mapping[str, Mapping[str, str]]) -> str:
    sections = []
    for group, points in groups.items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
