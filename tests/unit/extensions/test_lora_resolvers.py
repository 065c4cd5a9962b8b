import asyncio
import json

import pytest

from hardpoint.extensions import lora_resolvers
from hardpoint.extensions.registry import registry


def adapter(folder, **facts):
    folder.mkdir(parents=True)
    facts = {"peft_type": "LORA", "base_model_name_or_path": "base", **facts}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def resolve(resolver, name, base="base"):
    return asyncio.run(resolver.resolve_lora(base, name))


@pytest.fixture
def cache(tmp_path):
    adapter(tmp_path / "lc" / "good")
    adapter(tmp_path / "lc" / "team" / "one")
    adapter(tmp_path / "evil")
    (tmp_path / "lc" / "link").symlink_to(tmp_path / "evil")
    inside = tmp_path / "lc" / "inner"
    inside.mkdir()
    (inside / "adapter_config.json").symlink_to(tmp_path / "evil" / "adapter_config.json")
    return tmp_path / "lc"


def test_an_adapter_is_found_by_the_name_of_its_folder(cache):
    resolver = lora_resolvers.FilesystemResolver(str(cache))
    found = resolve(resolver, "good")
    assert (found.lora_name, found.lora_path) == ("good", str(cache / "good"))
    assert found.lora_int_id > 0
    assert resolve(resolver, "team/one").lora_path == str(cache / "team" / "one")


@pytest.mark.parametrize(
    "name",
    [
        *("../evil", "a/../../evil", "..\\evil", "link", "inner", "evil\0", "", ".", "..", "/", "./good", "good/"),
        *("x" * 5000, "good/../good", "missing", "good\n"),
    ],
)
def test_a_name_that_leaves_the_folder_or_is_no_name_finds_nothing(cache, name):
    assert resolve(lora_resolvers.FilesystemResolver(str(cache)), name) is None


def test_an_absolute_name_finds_nothing(cache):
    assert resolve(lora_resolvers.FilesystemResolver(str(cache)), str(cache.parent / "evil")) is None


def test_an_adapter_of_another_kind_or_model_is_not_taken(cache):
    adapter(cache / "ia3", peft_type="IA3")
    adapter(cache / "other", base_model_name_or_path="something")
    (cache / "broken").mkdir()
    (cache / "broken" / "adapter_config.json").write_text("{")
    resolver = lora_resolvers.FilesystemResolver(str(cache))
    for name in ("ia3", "other", "broken"):
        assert resolve(resolver, name) is None


def test_nothing_is_registered_without_the_variables(monkeypatch):
    for variable in ("VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST"):
        monkeypatch.delenv(variable, raising=False)
    lora_resolvers.register_filesystem_resolver()
    lora_resolvers.register_hf_hub_resolver()
    assert registry("lora_resolvers").names() == []


def test_the_filesystem_resolver_is_registered_for_a_folder_only(monkeypatch, cache):
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(cache / "missing"))
    with pytest.raises(ValueError, match="is not a folder"):
        lora_resolvers.register_filesystem_resolver()
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(cache))
    lora_resolvers.register_filesystem_resolver()
    assert registry("lora_resolvers").names() == ["Filesystem Resolver"]


def test_the_hub_resolver_needs_its_own_name_in_the_allowlist(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_LORA_RESOLVER_HF_REPO_LIST", "owner/repo")
    lora_resolvers.register_hf_hub_resolver()
    assert "add lora_hf_hub_resolver to VLLM_PLUGINS" in caplog.text
    assert registry("lora_resolvers").names() == []
    monkeypatch.setenv("VLLM_PLUGINS", "lora_hf_hub_resolver")
    lora_resolvers.register_hf_hub_resolver()
    assert registry("lora_resolvers").names() == ["Hf Hub Resolver"]


def test_the_hub_resolver_fetches_listed_repositories_only(monkeypatch, tmp_path):
    adapter(tmp_path / "sub")
    fetched = []

    def fetch(repo_id, allow_patterns):
        fetched.append((repo_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    resolver = lora_resolvers.HfHubResolver(["owner/repo"])
    assert resolve(resolver, "owner/repo/sub").lora_path == str(tmp_path / "sub")
    assert fetched == [("owner/repo", ["sub/adapter_config.json", "sub/adapter_model.safetensors"])]
    for name in ("owner/other/sub", "owner/repository", "owner/repo/../x", "owner/repo/a/../../x"):
        assert resolve(resolver, name) is None
    assert len(fetched) == 1
