"""Reference strings: parse them, import what they name, and name an object by one.

Two forms are in use, and which applies is a column of the table:
`pkg.module:Class.Nested` (parse_ref, load_ref) and `pkg.module.Class` (resolve_obj_by_qualname).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hardpoint.errors import ConfigError, HardpointError, PluginError


class RefShapeError(ConfigError):
    """A string that is not a reference of the wanted form (also a ValueError)."""


class RefImportError(PluginError, ImportError):
    """A reference whose module cannot be imported."""


class RefAttributeError(PluginError, AttributeError):
    """A reference whose module has no such attribute."""


def parse_ref(ref: str) -> tuple[str, str]:
    """Split `pkg.module:Class.Nested` into module and attribute path; RefShapeError otherwise."""
    parts = ref.split(":") if isinstance(ref, str) else ()
    if len(parts) != 2 or not all(part and _is_dotted_name(part) for part in parts):
        raise RefShapeError(
            f"{ref!r} is not a reference",
            code="ref-shape",
            fix="write it as <module>:<class>, with exactly one colon, such as my_package.models:MyModel",
        )
    return parts[0], parts[1]


def _is_dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def load_ref(ref: str) -> Any:
    """Import what `pkg.module:Class.Nested` names.

    Raises RefShapeError, RefImportError or RefAttributeError, each naming the reference.
    """
    module_name, path = parse_ref(ref)
    return _walk(_import(module_name, ref), path, ref)


def resolve_obj_by_qualname(qualname: str) -> Any:
    """Import what `pkg.module.Class` names, split at the last dot; errors as `load_ref`."""
    module_name, attribute = ref_from_qualname(qualname).split(":")
    return _walk(_import(module_name, qualname), attribute, qualname)


def ref_from_qualname(qualname: str) -> str:
    """Turn `pkg.module.Class` into `pkg.module:Class` without importing; RefShapeError when it has no dot."""
    module_name, _, attribute = qualname.rpartition(".") if isinstance(qualname, str) else ("", "", "")
    if not module_name or not attribute:
        raise RefShapeError(
            f"{qualname!r} is not a class path",
            code="ref-shape",
            fix="write it with its module, such as my_package.workers.MyWorker",
        )
    return f"{module_name}:{attribute}"


def loaded_ref(ref: str) -> Any | None:
    """What the reference names if its module is already imported, else None. Imports nothing."""
    module_name, path = parse_ref(ref)
    module = sys.modules.get(module_name)
    return None if module is None else _walk(module, path, ref)


def ref_of(obj: Any) -> str:
    """Name a class or function so that another process can import it.

    Raises RefShapeError for what another process cannot reach: something defined in a function,
    in the start script or in a notebook.
    """
    module_name = getattr(obj, "__module__", None)
    path = getattr(obj, "__qualname__", None)
    if not module_name or not path:
        raise RefShapeError(f"{obj!r} has no name to import it by", code="ref-none", fix="give a class or function")
    if module_name == "__main__" or "<locals>" in path:
        where = "the start script" if module_name == "__main__" else "a function"
        raise RefShapeError(
            f"{path} is defined in {where}, where another process cannot import it",
            code="ref-local",
            fix="move it to the top level of a module that can be imported",
        )
    return f"{module_name}:{path}"


def _import(module_name: str, ref: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except HardpointError:
        raise
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            what = f"{ref!r}: there is no module {missing!r}"
            fix = "check the spelling, and that the package is installed in this environment"
        else:
            what = f"{ref!r}: importing {module_name!r} failed because {missing!r} is not installed"
            fix = f"install the package that provides {missing!r}"
        raise RefImportError(what, code="ref-import", fix=fix) from error
    except Exception as error:
        raise RefImportError(
            f"{ref!r}: importing {module_name!r} raised {type(error).__name__}: {error}",
            code="ref-import",
            fix=f"mend {module_name}; VLLM_LOGGING_LEVEL=DEBUG shows the whole error",
        ) from error


def _walk(module: Any, path: str, ref: str) -> Any:
    found = module
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            owner = getattr(found, "__name__", type(found).__name__)
            raise RefAttributeError(
                f"{ref!r}: {owner!r} has no attribute {part!r}",
                code="ref-attribute",
                fix="check the spelling of the name after the module",
            ) from error
    return found
