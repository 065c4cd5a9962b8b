"""Plugins that nobody installed: from source text, or from the folder of a project. Fresh interpreters find them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Plugin:
    """Folders that hold modules and their distribution's metadata; put them on PYTHONPATH.

    folder  with the metadata    sources  further ones, with the modules of a project
    """

    folder: Path
    name: str
    version: str
    sources: tuple[Path, ...] = ()

    def environment(self, *others: Plugin, **variables: str) -> dict[str, str]:
        """The process environment with this plugin, and the others after it, on PYTHONPATH."""
        return plugin_environment([self, *others], **variables)

    @property
    def paths(self) -> tuple[str, ...]:
        """All folders, as `sys.path` takes them."""
        return tuple(str(folder) for folder in (self.folder, *self.sources))


def plugin_environment(plugins: Iterable[Plugin], **variables: str) -> dict[str, str]:
    """The process environment with these plugins' folders, in order, on PYTHONPATH."""
    folders = dict.fromkeys(path for plugin in plugins for path in plugin.paths)
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
    files = {f"{module}.py": source} if isinstance(source, str) else source
    for path, text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    _write_metadata(folder, name, version, entry_points or {})
    return Plugin(folder, name, version)


def project_plugin(project: Path, folder: Path) -> Plugin:
    """The plugin that installing the project would give, without installing it.

    project  with a pyproject.toml whose `[project]` names name, version and entry points; modules lie in it or in src
    folder   where to write the metadata
    """
    facts = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = str(facts.get("version", "0"))
    _write_metadata(folder, facts["name"], version, facts.get("entry-points", {}))
    sources = project / "src" if (project / "src").is_dir() else project
    return Plugin(folder, facts["name"], version, (sources.resolve(),))


def _write_metadata(folder: Path, name: str, version: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(_entry_points_text(entry_points), encoding="utf-8")


def _entry_points_text(groups: Mapping[str, Mapping[str, str]]) -> str:
    sections = []
    for group, points in groups.items():
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"
