"""Modules of the example plugins, imported by their own names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from hardpoint.cli.plugins_new import examples


def load_example(key: str, module: str = "") -> ModuleType:
    """The package of an example, or a module of it."""
    folder = str(examples() / key)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(f"acme_{key}" + (f".{module}" if module else ""))
