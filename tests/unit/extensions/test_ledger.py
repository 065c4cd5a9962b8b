import json

import pytest

from hardpoint.extensions.ledger import (
    BUILT_IN,
    LedgerEntry,
    Origin,
    acting_plugin,
    attributing,
    current_origin,
    ledger,
    plugin_behind,
)

ACME = Origin("acme", "1.2", "vllm.general_plugins", "acme", "acme.plugin", "/x/acme/plugin.py")


def test_what_happens_inside_is_attributed_to_the_plugin():
    with attributing(ACME):
        entry = ledger.record("register", "models", "X", detail="a:B")
    assert entry.origin == ACME
    assert entry.origin.label == "acme 1.2, vllm.general_plugins: acme"
    assert ledger.why("models", "X") == [entry]


def test_code_outside_a_plugin_is_named_by_its_module():
    assert ledger.record("register", "models", "X").origin.module == __name__
    assert current_origin().label == f"module {__name__}"
    assert BUILT_IN.label == "built in"


def test_a_patch_left_behind_is_attributed_to_its_package():
    namespace = {"__name__": "acme.patches", "acting": acting_plugin, "current": current_origin}
    exec("def patched():\n    return acting(), current()", namespace)
    assert namespace["patched"]()[0] is None
    ledger.know_package("acme", ACME)
    assert namespace["patched"]() == (ACME, ACME)


def raised_in(*modules: str) -> BaseException:
    """An error raised by a function of the last module, called through one of each other."""

    def inner():
        raise KeyError("x")

    for name in reversed(modules):
        namespace = {"__name__": name, "inner": inner}
        exec("def call():\n    return inner()", namespace)
        inner = namespace["call"]
    try:
        inner()
    except KeyError as error:
        return error


@pytest.mark.parametrize(
    ("modules", "blamed"),
    [
        (["hardpoint.cli.main", "acme.patches"], True),
        (["hardpoint.cli.main", "acme.patches", "json.decoder"], True),
        (["acme.patches", "hardpoint.config.resolve"], False),
        (["hardpoint.cli.main", "json.decoder"], False),
    ],
)
def test_an_error_is_blamed_on_the_plugin_whose_code_raised(modules, blamed):
    ledger.know_package("acme", ACME)
    assert plugin_behind(raised_in(*modules)) == (ACME if blamed else None)


def test_entries_survive_json_and_merge_once():
    with attributing(ACME):
        entry = ledger.record("load", "general", "acme", duration_s=0.25, detail="acme:register")
    sent = json.loads(json.dumps(ledger.export()))
    assert LedgerEntry.from_dict(sent[0]) == entry
    foreign = [{**sent[0], "pid": entry.pid + 1, "role": "worker"}]
    ledger.merge(foreign)
    ledger.merge(foreign)
    assert [e.role for e in ledger.entries(kind="load")] == [entry.role, "worker"]
    assert len(ledger.export()) == 1, "only this process's own entries are exported"
    ledger.merge([{**sent[0], "time": entry.time + 1, "role": "the same pid on another machine"}])
    assert len(ledger.entries(kind="load")) == 3


def test_entries_are_narrowed_by_kind_key_and_name():
    ledger.record("register", "models", "A")
    ledger.record("replace", "models", "A")
    ledger.record("register", "oot_ops", "A")
    assert [e.key for e in ledger.entries(kind="register", name="A")] == ["models", "oot_ops"]
    assert len(ledger.entries(key="models")) == 2


def test_a_listener_hears_until_it_stops():
    heard = []
    stop = ledger.listen(heard.append)
    ledger.announce("general", "x", ACME, "import")
    ledger.record("load", "general", "x")
    stop()
    ledger.record("call", "general", "x")
    assert [e.kind for e in heard] == ["begin", "load"]
    assert [e.kind for e in ledger.entries()] == ["load", "call"]


def test_the_ledger_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hardpoint.extensions.ledger._LIMIT", 2)
    for _ in range(5):
        ledger.record("warn", "models")
    assert len(ledger.entries()) == 2
    assert ledger.dropped == 3
