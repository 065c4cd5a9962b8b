from __future__ import annotations

import json

import pytest
from example_plugins import load_example

from hardpoint.contracts.lora_resolver import LoRAResolver
from hardpoint.extensions.lora_resolvers import FilesystemResolver, HfHubResolver
from hardpoint.testing import ContractFailure, check_lora_resolver
from hardpoint.types.lora_request import LoRARequest


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    facts = {"peft_type": "LORA", "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


def test_the_built_in_resolvers(adapter, monkeypatch):
    check_lora_resolver(FilesystemResolver(str(adapter.parent)), "model", "name")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda **asked: str(adapter))
    check_lora_resolver(HfHubResolver(["owner/name"]), "model", "owner/name")


def test_the_example(tmp_path):
    shelf = tmp_path / "shelf.json"
    shelf.write_text(json.dumps({"summaries": {"base": "model", "path": "/adapters/summaries"}}))
    check_lora_resolver(load_example("lora_resolvers").ShelfResolver(shelf), "model", "summaries")


class Trusting(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        return LoRARequest(lora_name, 1, f"/adapters/{lora_name}")


class Forgetful(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        return LoRARequest("known", 1, "/adapters/known") if lora_name == "known" else None


class Waiting(LoRAResolver):
    def resolve_lora(self, base_model_name, lora_name):
        return None


class Fragile(LoRAResolver):
    async def resolve_lora(self, base_model_name, lora_name):
        raise OSError(lora_name)


@pytest.mark.parametrize(
    ("resolver", "said"),
    [
        (Trusting(), "it has an adapter for the name"),
        (Forgetful(), "any base model"),
        (Waiting(), "not async"),
        (Fragile(), "names come from clients"),
        (Forgetful, "a class was given"),
        (object(), "no LoRAResolver"),
    ],
)
def test_a_resolver_that_breaks_the_contract_is_found_out(resolver, said):
    with pytest.raises(ContractFailure, match=said):
        check_lora_resolver(resolver, "model", "known")
