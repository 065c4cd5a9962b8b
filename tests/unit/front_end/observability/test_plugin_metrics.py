"""`hardpoint:plugin_*` counts what the ledger holds."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.extensions.ledger import LedgerEntry, ledger
from hardpoint.front_end.observability.prometheus import exposition


@pytest.fixture(autouse=True)
def fresh():
    ledger.clear()
    ledger.role = "front_end"
    yield
    ledger.clear()


def values() -> dict[tuple[str, ...], float]:
    """(metric, key, name, role) -> value."""
    found = {}
    for family in text_string_to_metric_families(exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("hardpoint:plugin_"):
                found[sample.name, *(sample.labels[name] for name in ("key", "name", "role"))] = sample.value
    return found


def test_loads_calls_faults_skips_and_durations_are_told_by_plugin_and_role():
    ledger.record("load", "general", "acme", duration_s=0.25)
    ledger.record("call", "general", "acme", duration_s=0.5)
    ledger.record("call", "general", "acme", duration_s=1.0)
    ledger.record("fault", "general", "bad")
    ledger.record("skip", "general", "left")
    ledger.record("replace", "models", "Net")
    # Of the engine core, as its message at the start brings it.
    other = LedgerEntry(7, 0.0, 4711, "engine_core", "load", "general", "acme", duration_s=2.0)
    ledger.merge([other.to_dict()])
    mine = ("general", "acme", "front_end")
    assert values() == {
        ("hardpoint:plugin_loads_total", *mine): 1,
        ("hardpoint:plugin_loads_total", "general", "acme", "engine_core"): 1,
        ("hardpoint:plugin_calls_total", *mine): 2,
        ("hardpoint:plugin_faults_total", "general", "bad", "front_end"): 1,
        ("hardpoint:plugin_skips_total", "general", "left", "front_end"): 1,
        ("hardpoint:plugin_replacements_total", "models", "Net", "front_end"): 1,
        ("hardpoint:plugin_load_seconds", *mine): 0.25,
        ("hardpoint:plugin_load_seconds", "general", "acme", "engine_core"): 2.0,
        ("hardpoint:plugin_call_seconds", *mine): 1.5,
    }
