"""What a model's name means: a path first, then the catalogue, then Hugging Face."""

from __future__ import annotations

import sys
import types

import pytest

from hardpoint.config import catalogue
from hardpoint.config.model_files import Hub, fetch_weights, locate
from hardpoint.config.sections import LoadConfig, ModelConfig
from hardpoint.errors import ModelFileError


class FakeHub(types.ModuleType):
    """Stands for huggingface_hub: notes calls, answers from a folder or raises."""

    def __init__(self, folder, failure: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.failure, self.calls = folder, failure, []
        self.files = ["model.Q8_0.gguf", "model.Q4_K_M.gguf", "README.md"]

    def _answer(self, name: str, arguments: dict) -> str:
        self.calls.append((name, arguments))
        if self.failure is not None:
            raise self.failure
        return str(self.folder)

    def snapshot_download(self, **arguments):
        return self._answer("snapshot_download", arguments)

    def hf_hub_download(self, **arguments):
        return self._answer("hf_hub_download", arguments)

    def list_repo_files(self, **arguments):
        self.calls.append(("list_repo_files", arguments))
        return self.files


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub(tmp_path / "snapshot")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    monkeypatch.setenv("HARDPOINT_CACHE", str(tmp_path / "cache"))
    return fake


def test_an_existing_path_wins(tmp_path, hub, monkeypatch):
    (tmp_path / "smollm2-135m-instruct").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("smollm2-135m-instruct", Hub()).is_dir()
    assert hub.calls == []


def test_a_link_to_nothing_is_no_repository(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(ModelFileError, match=r"link to .*gone\.gguf"):
        locate("models/m.gguf", Hub())
    assert hub.calls == []


def test_a_catalogue_name_is_pulled(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(catalogue, "pull", lambda model, report: tmp_path / model.name)
    assert locate("SmolLM2-135M-Instruct", Hub()) == tmp_path / "smollm2-135m-instruct"
    assert hub.calls == []


def test_a_repository_is_fetched_without_its_weights(hub):
    settings = Hub(revision="v1", token="secret", folder="/downloads", ignore=("original/**/*",))
    assert locate("owner/repo", settings) == hub.folder
    ((name, arguments),) = hub.calls
    assert (name, arguments["repo_id"], arguments["revision"]) == ("snapshot_download", "owner/repo", "v1")
    assert (arguments["token"], arguments["cache_dir"]) == ("secret", "/downloads")
    assert "original/**/*" in arguments["ignore_patterns"]
    assert not any("safetensors" in pattern for pattern in arguments["allow_patterns"])


def test_weights_are_fetched_when_they_are_loaded(hub):
    model = ModelConfig(model="owner/repo")
    model.local_path = str(hub.folder)
    assert fetch_weights(model, LoadConfig(download_dir="/d")) == hub.folder
    ((_, arguments),) = hub.calls
    assert "*.safetensors" in arguments["allow_patterns"]
    assert arguments["cache_dir"] == "/d"


def test_weights_of_a_local_model_need_no_hub(tmp_path, hub):
    assert fetch_weights(ModelConfig(model=str(tmp_path)), LoadConfig()) == tmp_path
    assert hub.calls == []


def test_one_file_of_a_repository(hub):
    locate("owner/repo/sub/model.Q8_0.gguf", Hub())
    locate("owner/repo:q4_k_m", Hub())
    names = [arguments.get("filename") for name, arguments in hub.calls if name == "hf_hub_download"]
    assert names == ["sub/model.Q8_0.gguf", "model.Q4_K_M.gguf"]
    with pytest.raises(ModelFileError, match=r"no \.gguf file of the kind Q2_K; it has: model\.Q4_K_M\.gguf"):
        locate("owner/repo:Q2_K", Hub())


def test_all_parts_of_a_split_file_are_fetched(hub):
    locate("owner/repo/big-00002-of-00003.gguf", Hub())
    names = [arguments["filename"] for _, arguments in hub.calls]
    assert names == [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("RepositoryNotFoundError", "no such repository"),
        ("GatedRepoError", "gated"),
        ("RevisionNotFoundError", "no such revision"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("OfflineModeIsEnabled", "offline mode is on"),
        ("SomethingElse", "SomethingElse: it broke"),
    ],
)
def test_hub_failures_are_told_in_words(hub, kind, text):
    hub.failure = type(kind, (Exception,), {})("it broke\nwith a long explanation")
    with pytest.raises(ModelFileError, match=text) as caught:
        locate("owner/repo", Hub())
    assert "'owner/repo'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline_is_named_when_it_is_why(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.failure = type("LocalEntryNotFoundError", (Exception,), {})("x")
    with pytest.raises(ModelFileError, match="offline mode is on and it is not in the cache"):
        locate("owner/repo", Hub())


@pytest.mark.parametrize("name", ["/no/such/folder", "./model.gguf", "a/b/c", "smollm3:", "~/nothing"])
def test_what_is_neither_path_nor_repository_is_refused_without_asking(hub, name):
    with pytest.raises(ModelFileError, match="there is no such file or folder"):
        locate(name, Hub())
    assert hub.calls == []


def test_a_near_miss_of_the_catalogue_is_offered(hub):
    hub.failure = type("RepositoryNotFoundError", (Exception,), {})("404")
    with pytest.raises(ModelFileError, match="did you mean smollm2-135m-instruct"):
        locate("smollm2-135-instruct", Hub())
