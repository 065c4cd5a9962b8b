from dataclasses import replace

import pytest

from hardpoint.extensions.diagnosis import diagnose
from hardpoint.extensions.ledger import BUILT_IN, LedgerEntry, Origin
from hardpoint.extensions.report import BootReport


def entry(kind, key="general", name="x", **parts):
    return LedgerEntry(0, 0.0, 1, "front_end", kind, key, name, **parts)


def found(*reports, timeout=60.0):
    return [(one.severity, one.what, one.roles) for one in diagnose(reports, timeout)]


def healthy(role, *entries):
    return BootReport(role, 0, list(entries), finished=True)


def test_a_healthy_boot_has_no_findings():
    assert found(healthy("worker", entry("discover"), entry("load", duration_s=0.01), entry("call"))) == []


def test_the_same_fault_in_several_roles_is_one_finding_worst_first():
    fault = entry("fault", detail="it broke", fix="mend it")
    skip = entry("skip", detail="not named in VLLM_PLUGINS")
    reports = [healthy("front_end", skip, fault), healthy("worker", fault)]
    assert found(*reports) == [
        ("error", "it broke", ("front_end", "worker")),
        ("note", "general plugin 'x' is left out: not named in VLLM_PLUGINS", ("front_end",)),
    ]


def test_a_stop_is_told_unless_a_fault_told_it():
    stop = {"what": "two platforms", "fix": "uninstall one", "code": "platform-two"}
    report = BootReport("worker", 1, [], stops=[stop], finished=True)
    assert found(report) == [("error", "two platforms", ("worker",))]
    report.entries.append(entry("fault", detail="two platforms"))
    assert len(found(report)) == 1


def test_slow_imports_and_replacements_are_warnings():
    slow = entry("load", duration_s=1.2, detail="p:f; it imports torch")
    replaced = entry("replace", "models", "Llama", detail="a:B replaces c:D (built in)")
    findings = found(healthy("worker", slow, replaced, entry("call", duration_s=0.4)))
    assert [severity for severity, *_ in findings] == ["warning", "warning"]
    assert "takes 1 s in each process (it imports torch)" in findings[0][1]
    assert "a:B replaces c:D (built in)" in findings[1][1]


def test_a_boot_that_hangs_or_dies_names_what_was_running():
    hangs = BootReport("worker", None, begun=("general", "b_bad", "call"))
    dies = BootReport("worker", 9, begun=("general", "b_bad", "import"))
    silent = BootReport("worker", 1)
    assert "the call of general plugin 'b_bad' does not end within 5 s" in found(hangs, timeout=5)[0][1]
    assert "the import of general plugin 'b_bad' ends the process (status 9)" in found(dies)[0][1]
    assert "the boot ends the process" in found(silent)[0][1]


def test_what_goes_to_a_planned_registry_is_a_note():
    planned = entry("warn", "sleep_mode_backends", "disk", detail="noted")
    other = entry("warn", "VLLM_PLUGINS", "typo", detail="matches nothing")
    assert [severity for severity, *_ in found(healthy("worker", planned, other))] == ["warning", "note"]


@pytest.mark.parametrize(("seconds", "severity"), [(0.1, "note"), (2.0, "warning")])
@pytest.mark.parametrize(("kind", "detail"), [("load", "m:f; it imports torch"), ("call", "it imports torch")])
def test_torch_in_the_front_end_is_noted(kind, detail, seconds, severity):
    run = entry(kind, detail=detail, duration_s=seconds)
    (one,) = diagnose([healthy("front_end", run)], 60)
    assert one.severity == severity
    assert "torch" in one.what
    assert "module:Class" in one.fix
    elsewhere = diagnose([healthy("worker", replace(run, role="worker"))], 60)
    assert bool(elsewhere) == (severity == "warning"), "a worker is the place for it"


def test_what_becomes_of_a_registration_names_who_made_it():
    acme = Origin("acme", "1.0", "vllm.general_plugins", "acme")
    unbuilt = entry("warn", "oot_ops", "rms_norm", origin=acme, detail="registered but never built", fix="rename it")
    unused = entry("skip", "oot_ops", "GeluAndMul", origin=acme, detail="this model has none")
    ours = entry("warn", "oot_ops", "quant", origin=BUILT_IN, detail="there is no op 'quant'")
    assert found(healthy("worker", unbuilt, unused, ours)) == [
        ("warning", "registered but never built [from acme 1.0, vllm.general_plugins: acme]", ("worker",)),
        ("warning", "there is no op 'quant'", ("worker",)),
        (
            "note",
            "oot_ops entry 'GeluAndMul': this model has none [from acme 1.0, vllm.general_plugins: acme]",
            ("worker",),
        ),
    ]


def test_a_class_that_cannot_be_had_is_told_once_for_all_roles():
    fault = entry("fault", "models", "Toy", detail="Toy: no driver", fix="install it")
    stop = {"what": "Model architectures ['Toy'] failed to be inspected. Toy: no driver", "fix": "", "code": "model"}
    front_end = BootReport("front_end", 1, [fault], stops=[stop], finished=True)
    assert [one[2] for one in found(front_end, healthy("inspector", fault))] == [("front_end", "inspector")]
