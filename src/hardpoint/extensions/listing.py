"""The table with what is installed and registered, as plain data for people and programs."""

from __future__ import annotations

from typing import Any

from hardpoint.extensions.discovery import Allowlist, Found, catalogue
from hardpoint.extensions.points import CONFIG_HOOKS, GROUPS, PLATFORM_HOOKS, REGISTRIES
from hardpoint.extensions.registry import Entry, registry


def table_as_dict() -> dict[str, Any]:
    """Every row with its entries as they are in this process. Imports no plugin."""
    allowlist = Allowlist.read()
    return {
        "allowlist": allowlist.in_words(),
        "remarks": [remark for _, remark in allowlist.remarks(catalogue.all())],
        "groups": [
            {
                "key": row.key,
                "group": row.group,
                "allowlist": row.allow.value,
                "roles": row.roles.label,
                "state": row.state.value,
                "entries": [_point(found, allowlist.refusal(row, found.name)) for found in catalogue.group(row.group)],
            }
            for row in GROUPS
        ],
        "registries": [
            {
                "key": row.key,
                "chosen_by": row.chosen_by,
                "roles": row.roles.label,
                "state": row.state.value,
                "entries": [_entry(entry) for entry in registry(row.key).entries()],
            }
            for row in REGISTRIES
        ],
        "config_hooks": [
            {"key": h.key, "flag": h.flag, "field": h.field, "format": h.shape.value, "state": h.state.value}
            for h in CONFIG_HOOKS
        ],
        "platform_hooks": [
            {"key": h.key, "moment": h.moment, "often": h.often, "roles": h.roles.label, "state": h.state.value}
            for h in PLATFORM_HOOKS
        ],
    }


def _point(found: Found, why_not: str) -> dict[str, Any]:
    return {
        "name": found.name,
        "value": found.value,
        "distribution": found.distribution,
        "version": found.version,
        "built_in": found.built_in,
        "loads": not why_not,
        "why_not": why_not,
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {"name": entry.name, "target": entry.target, "origin": entry.origin.label}
