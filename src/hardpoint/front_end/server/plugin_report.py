"""/plugins: what the table of extension points says and what the ledgers of all processes hold."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from hardpoint.errors import HardpointError
from hardpoint.extensions import plugin_config
from hardpoint.extensions.discovery import catalogue
from hardpoint.extensions.ledger import LedgerEntry, ledger
from hardpoint.extensions.patches import patches
from hardpoint.extensions.points import GROUPS, REGISTRIES, ROWS
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)
_ASK_S = 5.0


async def report(engine: Any) -> bytes:
    """The answer of /plugins as JSON; the engine core's and the workers' ledgers are asked for first."""
    await _gather(engine)
    patches.look()
    entries = ledger.entries()
    body = {
        "processes": _processes(entries),
        "groups": [_group(row) for row in GROUPS],
        "registries": [_registry(row) for row in REGISTRIES],
        "rows": [{"key": row.key, "kind": type(row).__name__, "state": row.state.value} for row in ROWS],
        "settings": plugin_config.declared(),
        "ledger": [entry.to_dict() for entry in entries],
        "dropped": ledger.dropped,
    }
    return msgspec.json.encode(body, enc_hook=str)


async def _gather(engine: Any) -> None:
    """Merge the ledgers of the engine's processes, where the engine can give them."""
    ask = getattr(engine, "get_ledger", None)
    if ask is None:
        return
    try:
        ledger.merge(await asyncio.wait_for(ask(), _ASK_S))
    except (TimeoutError, HardpointError) as error:
        # What was merged before is still shown.
        logger.warning("the engine's plugin ledger is not available: %s", error)


def _processes(entries: list[LedgerEntry]) -> list[dict[str, Any]]:
    roles: dict[int, str] = {}
    for entry in entries:
        roles[entry.pid] = entry.role
    return [{"pid": pid, "role": role} for pid, role in roles.items()]


def _group(row: Any) -> dict[str, Any]:
    return {
        "key": row.key,
        "group": row.group,
        "state": row.state.value,
        "installed": [
            {"name": found.name, "value": found.value, "package": found.package, "built_in": found.built_in}
            for found in catalogue.group(row.group)
        ],
    }


def _registry(row: Any) -> dict[str, Any]:
    entries = registry(row.key).entries()
    return {
        "key": row.key,
        "state": row.state.value,
        "entries": [
            {"name": entry.name, "target": entry.target, "origin": entry.origin.label, "built_in": entry.built_in}
            for entry in entries
        ],
    }
