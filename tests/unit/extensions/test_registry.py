import importlib
import logging
import subprocess
import sys

import pytest
import torch

from hardpoint.errors import RegistrationError
from hardpoint.extensions import registry as registry_module
from hardpoint.extensions.ledger import Origin, attributing, ledger
from hardpoint.extensions.points import REGISTRIES
from hardpoint.extensions.registry import PlannedError, isolated, registry, transaction
from hardpoint.extensions.rows import Duplicate, State

ACME = Origin("acme", "1.0", "vllm.general_plugins", "acme", "acme")
BETA = Origin("beta", "2.0", "vllm.general_plugins", "beta", "beta")


class Net(torch.nn.Module):
    pass


def sample(row):
    """A value the row takes, and a second one."""
    if row.key == "lora_resolvers":
        return object(), object()
    if row.check.value == "is a class, else TypeError":
        return type("A", (), {}), type("B", (), {})
    return "first.module:A", "second.module:B"


@pytest.mark.parametrize("row", REGISTRIES, ids=lambda row: row.key)
@pytest.mark.parametrize("strict", [False, True])
def test_a_name_taken_follows_the_rule_of_the_row(row, strict, caplog):
    first, second = sample(row)
    one = registry(row.key)
    one.register("N", first, ACME)
    rule = row.strict_duplicate if strict else row.duplicate
    expected = {
        Duplicate.REFUSE: ValueError,
        Duplicate.ASSERT: AssertionError,
        Duplicate.KEY_ERROR: KeyError,
    }.get(rule)
    with caplog.at_level(logging.DEBUG, "hardpoint"):
        caplog.clear()
        if expected is not None:
            with pytest.raises(expected) as caught:
                one.register("N", second, BETA, strict=strict)
            assert isinstance(caught.value, RegistrationError)
            assert "acme 1.0" in str(caught.value)
            assert "beta 2.0" in str(caught.value)
            assert one.entry("N").origin == ACME
            return
        one.register("N", second, BETA, strict=strict)
        one.register("N", first, BETA, strict=strict)
    assert one.entry("N").origin == BETA
    said = [record for record in caplog.records if "is replaced" in record.getMessage()]
    level = logging.WARNING if rule is Duplicate.REPLACE_WARN else logging.DEBUG
    assert [record.levelno for record in said] == [logging.WARNING, level], "somebody else's, then its own"
    assert "acme 1.0" in said[0].getMessage()
    assert "beta 2.0" in said[0].getMessage()
    assert ledger.entries(kind="replace", key=row.key, name="N")[0].origin == BETA


def test_rules_of_the_rows_are_those_of_vllm():
    rules = {row.key: (row.duplicate.name, row.strict_duplicate.name) for row in REGISTRIES}
    assert rules["models"] == ("REPLACE_QUIET", "REPLACE_QUIET")
    assert rules["oot_ops"] == rules["pluggable_layers"] == ("ASSERT", "ASSERT")
    assert rules["attention_backends"] == ("REPLACE_QUIET", "REFUSE")
    assert rules["quantization_methods"] == ("REPLACE_QUIET", "REPLACE_QUIET")
    assert rules["model_loaders"] == rules["lora_resolvers"] == rules["kv_cache_dtypes"] == ("REPLACE_WARN",) * 2
    for key in ("kv_connectors", "ec_connectors", "kv_offloading_specs", "sleep_mode_backends"):
        assert rules[key] == ("REFUSE", "REFUSE")
    assert rules["tool_parsers"] == rules["reasoning_parsers"] == ("REPLACE_QUIET", "KEY_ERROR")


def test_a_reference_is_imported_only_when_loaded():
    models = registry("models")
    models.register("Mine", "no_such_module_anywhere:Net")
    assert "Mine" in models
    with pytest.raises(ImportError, match="no_such_module_anywhere"):
        models.load("Mine")
    models.register("Mine", f"{__name__}:Net")
    assert models.load("Mine") is Net


def test_a_failed_import_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    models = registry("models")
    models.register("Late", "p_late:Net")
    with pytest.raises(ImportError):
        models.load("Late")
    (tmp_path / "p_late.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
    importlib.invalidate_caches()
    assert models.load("Late").__name__ == "Net"


def test_models_take_a_module_class_or_a_reference_and_nothing_else():
    models = registry("models")
    assert models.register("A", Net).load() is Net
    for wrong in (int, Net(), 3, None):
        with pytest.raises(TypeError):
            models.register("B", wrong)
    for wrong in ("module.Class", "a:b:c", ":Class", "module:"):
        with pytest.raises(ValueError, match="<module>:<class>"):
            models.register("B", wrong)
    with pytest.raises(TypeError, match="must be a str, not int"):
        models.register(3, "a:B")
    assert "B" not in models


def test_a_reference_to_the_wrong_class_is_refused_when_loaded():
    models = registry("models")
    models.register("Wrong", "json:JSONDecoder", ACME)
    with pytest.raises(TypeError, match=r"does not derive from torch\.nn\.Module") as caught:
        models.load("Wrong")
    assert "acme 1.0" in str(caught.value)


def test_a_plugins_entry_that_cannot_be_imported_names_the_plugin():
    models = registry("models")
    models.register("Gone", "no_such_module_anywhere:Net", ACME)
    with pytest.raises(ImportError, match=r"\[from acme 1.0, vllm.general_plugins: acme\]"):
        models.load("Gone")


def test_the_use_of_an_entry_is_told_unless_it_is_ours():
    models = registry("models")
    models.register("Mine", "a:B", ACME)
    before = len(ledger.entries(kind="override"))
    models.note_use("LlamaForCausalLM", "is built")
    models.note_use("Mine", "is built")
    [used] = ledger.entries(kind="override")[before:]
    assert (used.key, used.name, used.detail, used.origin) == ("models", "Mine", "a:B is built", ACME)


def test_subclass_checks_import_nothing_and_raise_the_error_of_the_row():
    with pytest.raises(ValueError, match="does not derive from"):
        registry("model_loaders").register("mine", Net)
    with pytest.raises(ValueError, match="does not derive from"):
        registry("quantization_methods").register("mine", Net)
    with pytest.raises(TypeError, match="does not derive from"):
        registry("tool_parsers").register("mine", Net)
    with pytest.raises(TypeError, match="give a class"):
        registry("oot_ops").register("RMSNorm", "a:B")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(KeyError) as caught:
        registry("models").load("LlamaForCasualLM")
    assert "did you mean: LlamaForCausalLM" in str(caught.value)


def test_case_matters_only_where_the_row_says():
    registry("quantization_methods").register("MyQuant", "a:B")
    assert registry("quantization_methods").get("myquant").name == "MyQuant"
    registry("models").register("MyNet", "a:B")
    assert registry("models").get("mynet") is None


@pytest.mark.parametrize("row", [r for r in REGISTRIES if r.state is State.PLANNED], ids=lambda row: row.key)
def test_a_planned_row_notes_registrations_and_refuses_selection(row, caplog):
    value, _ = sample(row)
    with caplog.at_level(logging.WARNING, "hardpoint"):
        registry(row.key).register("mine", value, ACME)
    assert f"does not use {row.key} yet" in caplog.text
    assert ledger.entries(kind="warn", key=row.key, name="mine")
    with pytest.raises(PlannedError, match=f"{row.key} entry 'mine' was chosen") as caught:
        registry(row.key).load("mine")
    assert isinstance(caught.value, ValueError)


def test_a_transaction_undoes_everything_and_says_so():
    models, loaders = registry("models"), registry("model_loaders")
    before = models.names(), loaders.names()
    replaced = models.entry("LlamaForCausalLM")

    def fail_half_way():
        with attributing(ACME), transaction():
            models.register("New", "a:B")
            models.register("LlamaForCausalLM", "a:Llama")
            loaders.unregister("dummy")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert (models.names(), loaders.names()) == before
    assert models.entry("LlamaForCausalLM") is replaced
    rolled_back = {(e.key, e.name): e.origin for e in ledger.entries(kind="rollback")}
    assert rolled_back == dict.fromkeys(
        [("models", "New"), ("models", "LlamaForCausalLM"), ("model_loaders", "dummy")], ACME
    )


def test_a_transaction_that_ends_well_is_kept():
    with transaction():
        registry("models").register("New", "a:B")
    assert "New" in registry("models")


def test_isolation_leaves_no_trace():
    with isolated():
        registry("models").register("New", "a:B")
        with registry("model_loaders").isolated() as loaders:
            loaders.register("mine", "a:B")
            assert "mine" in loaders
        assert "mine" not in registry("model_loaders")
    assert "New" not in registry("models")


def test_the_mapping_is_the_dict_that_plugins_reach_for():
    ops = registry("oot_ops").mapping()
    ops["RMSNorm"] = Net
    assert ops["RMSNorm"] is Net
    assert registry("oot_ops").entry("RMSNorm").load() is Net
    ops["RMSNorm"] = torch.nn.Linear  # a dict replaces, unlike the register call of this row
    assert dict(ops) == {"RMSNorm": torch.nn.Linear}
    assert ops.pop("RMSNorm") is torch.nn.Linear
    assert "RMSNorm" not in registry("oot_ops")
    with pytest.raises(KeyError):
        ops["RMSNorm"]
    with pytest.raises(KeyError):
        del ops["RMSNorm"]
    assert [e.kind for e in ledger.entries(key="oot_ops")] == ["register", "replace", "unregister"]


FORK = """
import os
from hardpoint.extensions.ledger import Origin
from hardpoint.extensions.registry import registry

acme = Origin("acme", "1.0", "vllm.general_plugins", "acme", "acme")
beta = Origin("beta", "1.0", "vllm.general_plugins", "beta", "beta")
connectors = registry("kv_connectors")

def attempt(who):
    try:
        connectors.register("Mine", "a:B", who)
        return "taken"
    except ValueError:
        return "refused"

attempt(acme)
if os.fork() == 0:
    print("child", attempt(acme), attempt(beta), flush=True)
    os._exit(0)
os.wait()
print("parent", attempt(acme))
"""


def test_a_forked_child_may_register_again_what_it_inherited():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["child taken refused", "parent refused"]


def test_there_is_no_registry_without_a_row():
    with pytest.raises(KeyError):
        registry("something_else")
    assert list(registry_module._registries) == [row.key for row in REGISTRIES]
