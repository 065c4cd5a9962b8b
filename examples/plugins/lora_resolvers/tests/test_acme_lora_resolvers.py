import json
from pathlib import Path

from acme_lora_resolvers import ShelfResolver, register

from hardpoint.contracts.lora_resolver import LoRAResolverRegistry
from hardpoint.testing import check_lora_resolver, check_project

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_lora_resolvers": register}


def test_it_keeps_the_contract(tmp_path):
    shelf = tmp_path / "shelf.json"
    shelf.write_text(json.dumps({"summaries": {"base": "model", "path": "/adapters/summaries"}}))
    check_lora_resolver(ShelfResolver(shelf), "model", "summaries")


def test_it_is_registered(isolated_registries, monkeypatch):
    monkeypatch.setenv("ACME_SHELF", "other.json")
    register()
    assert LoRAResolverRegistry.get_resolver("acme").shelf == Path("other.json")
