"""What a registered model class declares: asked of a child process once, then remembered on disk.

Torch-free. The record of a class is good as long as nothing has changed that it was made from: our version, the
package's version and files, the files of the classes it inherits from, and which plugins are loaded. Whatever is
wrong with a record, or with the folder, makes it one that is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from hardpoint import __version__
from hardpoint.env import cache_root
from hardpoint.errors import ConfigError
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.loading import loaded_plugins
from hardpoint.extensions.refs import load_ref, parse_ref
from hardpoint.extensions.registry import Entry
from hardpoint.extensions.sources import digest, digests, files_of
from hardpoint.links.inspection import inspect_in_child
from hardpoint.log import init_logger
from hardpoint.types.messages import Inspected
from hardpoint.types.model_info import Inspection, ModelInfo

logger = init_logger(__name__)

_MAX_RECORD_BYTES = 4 << 20
_INSPECTION_OF = "hardpoint.contracts.model:inspection_of"


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """A file of the cache. `key` covers what is known beforehand, `sources` what the child found."""

    key: str
    sources: dict[str, str]
    path: str
    info: dict[str, Any]
    remarks: list[str]


def inspect_entry(entry: Entry) -> Inspection:
    """What a registered class declares; a class that is not imported yet is imported by a child only.

    Raises the like of what its import raised, or StartError; `child_output` of the error is what the child wrote.
    """
    if entry.is_loaded:
        return load_ref(_INSPECTION_OF)(entry.load())
    module_name, _ = parse_ref(entry.ref)
    if module_name == "__main__":
        raise ConfigError(
            f"{entry.ref!r} is in the start script, where another process cannot import it",
            code="model-class",
            origin=entry.origin.label,
            fix="move the class to a module, and register it in a general plugin",
        )
    key = _key(entry, module_name)
    file = _file(entry.ref)
    known = _recall(file, key)
    if known is None:
        return _ask_child(entry, file, key)
    _note(entry, known, "as remembered")
    return known


def _ask_child(entry: Entry, file: Path | None, key: str) -> Inspection:
    started = time.perf_counter()
    found = inspect_in_child(entry.ref)
    ledger.merge(found.ledger)
    known = Inspection(ModelInfo.from_dict(found.info), found.path, tuple(found.remarks))
    _note(entry, known, f"asked in {time.perf_counter() - started:.1f} s")
    _remember(file, key, found)
    return known


def _note(entry: Entry, known: Inspection, how: str) -> None:
    declared = [name for name, value in known.info.to_dict().items() if value is True]
    detail = f"{known.path} declares {', '.join(declared) or 'nothing'}; {how}"
    logger.debug("model class %s: %s", entry.name, detail)
    ledger.record("inspect", "models", entry.name, origin=entry.origin, detail=detail)


def _key(entry: Entry, module_name: str) -> str:
    """A digest of what the answer depends on as far as it is known beforehand; empty when that is nothing."""
    files = digests(files_of(module_name))
    origin = entry.origin
    if not files and not origin.version:
        return ""
    parts = [__version__, sys.version, entry.ref, origin.distribution, origin.version, loaded_plugins(), files]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file(ref: str) -> Path | None:
    module_name, path = parse_ref(ref)
    # Two environments may have packages of one name.
    mark = hashlib.sha256(f"{ref} {sys.prefix}".encode()).hexdigest()[:8]
    try:
        return cache_root() / "modelinfos" / f"{module_name.replace('.', '-')[:80]}-{path[:60]}-{mark}.json"
    except RuntimeError:  # there is no home directory
        return None


def _recall(file: Path | None, key: str) -> Inspection | None:
    if file is None or not key:
        return None
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_RECORD_BYTES:
            raise ValueError("it is not one of our files")
        record = msgspec.json.decode(file.read_bytes(), type=_Record)
        if record.key != key or any(digest(Path(path)) != known for path, known in record.sources.items()):
            return None
        return Inspection(ModelInfo.from_dict(record.info), record.path, tuple(record.remarks))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        logger.debug("what is remembered of a model class in %s cannot be used: %s", file, error)
        return None


def _remember(file: Path | None, key: str, found: Inspected) -> None:
    if file is None or not key:
        return
    record = _Record(key, found.sources, found.path, found.info, found.remarks)
    temporary = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another server may write the same file, or read it, at this moment.
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(record))
        os.replace(temporary, file)
    except OSError as error:
        logger.debug("what a model class declares cannot be remembered in %s: %s", file, error)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
