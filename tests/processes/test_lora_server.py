"""A real server with LoRA adapters: chosen by model name, loaded and unloaded while it runs, found by a resolver."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_adapters import write_adapter
from server_process import ServerProcess

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory) -> Path:
    """Adapters: `first` and `second` to be given by path; in `cache` the resolver's; `evil` beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(["first", "second", "cache/found", "cache/late", "evil"]):
        write_adapter(tiny_llama, folder / name, seed, std=0.3)
    write_adapter(tiny_llama, folder / "large", 9, rank=32)
    write_adapter(tiny_llama, folder / "cache" / "too-large", 9, rank=32)
    (folder / "cache" / "link").symlink_to(folder / "evil")
    inside = folder / "cache" / "borrowed"
    inside.mkdir()
    shutil.copy(folder / "evil" / "adapter_config.json", inside)
    (inside / "adapter_model.safetensors").symlink_to(folder / "evil" / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(tiny_llama, folder):
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder / "cache")}
    flags = [
        "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--lora-modules", f"first={folder / 'first'}",
        f'{{"name": "second", "path": "{folder / "second"}", "base_model_name": "the-base"}}',
    ]  # fmt: skip
    with ServerProcess(tiny_llama, *flags, env=env) as server:
        yield server.wait_ready()


def text_of(server: ServerProcess, model: str, **more) -> str:
    answer = server.complete(PROMPT, model=model, ignore_eos=True, **more)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def load(server: ServerProcess, **body):
    return server.http.post("/v1/load_lora_adapter", json=body)


def unload(server: ServerProcess, name: str):
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def listed(server: ServerProcess) -> dict[str, dict]:
    return {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}


def test_adapters_are_models_with_a_parent(server, folder):
    cards = listed(server)
    assert (cards["m"]["parent"], cards["first"]["parent"], cards["second"]["parent"]) == (None, "m", "the-base")
    assert cards["first"]["root"] == str(folder / "first")
    assert server.http.get("/v1/models/first").json()["id"] == "first"


def test_each_request_gets_the_adapter_it_names_also_in_one_batch(server):
    names = ["m", "first", "second"]
    alone = {name: text_of(server, name) for name in names}
    assert len(set(alone.values())) == 3
    with ThreadPoolExecutor(9) as threads:
        together = list(threads.map(lambda name: (name, text_of(server, name)), names * 3))
    assert all(text == alone[name] for name, text in together)


def test_chat_streams_and_tokenize_know_adapters(server):
    body = {"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["model"]) == (200, "first")
    events = list(server.stream(8, model="first"))
    assert {event["model"] for event in events} == {"first"}
    assert server.http.post("/tokenize", json={"model": "first", "prompt": "Hi"}).status_code == 200


def test_an_adapter_is_loaded_replaced_and_unloaded(server, folder):
    answer = load(server, lora_name="new", lora_path=str(folder / "evil"))
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    before = text_of(server, "new")
    again = load(server, lora_name="new", lora_path=str(folder / "second"))
    assert (again.status_code, again.json()["error"]["type"]) == (400, "InvalidUserInput")
    assert load(server, lora_name="new", lora_path=str(folder / "second"), load_inplace=True).status_code == 200
    # What the old weights put into the prefix cache is not used.
    assert text_of(server, "new") == text_of(server, "second") != before
    answer = unload(server, "new")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert server.complete(model="new").status_code == 404
    assert "new" not in listed(server)
    assert unload(server, "new").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_name": "x"}, 400, "'lora_name' and 'lora_path'"),
        ({"lora_path": "x"}, 400, "'lora_name' and 'lora_path'"),
        ({"lora_name": "m", "lora_path": "first"}, 400, "base model"),
        ({"lora_name": "x", "lora_path": "first", "is_3d_lora_weight": True}, 400, "experts"),
        ({"lora_name": "x", "lora_path": "nowhere"}, 404, "not there"),
        ({"lora_name": "x", "lora_path": "cache"}, 404, "no adapter_config.json"),
        ({"lora_name": "x", "lora_path": "large"}, 400, "rank 32 is more than max_lora_rank=16"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_words(server, folder, body, status, said):
    if "lora_path" in body and body["lora_path"] != "x":
        body = {**body, "lora_path": str(folder / body["lora_path"])}
    answer = load(server, **body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert server.complete(model="x").status_code == 404


def test_a_resolver_finds_a_name_that_nobody_loaded(server):
    assert text_of(server, "found") != text_of(server, "m")
    assert "found" in listed(server)


def test_many_first_requests_load_an_adapter_once(server):
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: text_of(server, "late"), range(8)))
    assert len(set(texts)) == 1
    assert len(server.lines("adapter 'late' is served")) == 1


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "found/../../evil", "..\\evil", "link", "borrowed", "evil\0", "x" * 5000, ".", "..", "/", "found/",
        "{folder}/evil", "{folder}/cache/found", "absent",
    ],
)  # fmt: skip
def test_a_name_does_not_leave_the_resolvers_folder(server, folder, name):
    answer = server.complete(model=name.format(folder=folder))
    assert answer.status_code == 404, answer.text
    assert "is served from" not in answer.text
    assert server.complete().status_code == 200
    assert not [card for card in listed(server).values() if "evil" in (card["root"] or "")]


def test_an_adapter_that_is_found_and_cannot_be_loaded_is_the_requests_own_error(server, folder):
    answer = server.complete(model="too-large")
    assert answer.status_code == 400
    assert "--max-lora-rank 32" in answer.json()["error"]["message"]
    assert str(folder) not in answer.text
    assert server.complete().status_code == 200


def test_more_adapters_than_there_is_room_for_take_turns(server):
    names = ["first", "second", "found", "late"]
    alone = {name: text_of(server, name) for name in names}
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(lambda name: (name, text_of(server, name)), names * 4))
    assert all(text == alone[name] for name, text in together)


def test_metrics_tell_which_adapters_are_in_use(server):
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(lambda: list(server.stream(500, model="first")))
        next(event for event in server.stream(60, model="second"))
        metrics = server.http.get("/metrics").text
        running.result()
    shown = [line for line in metrics.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(shown) == 1
    assert 'max_lora="2"' in shown[0]
    assert "first" in shown[0]


def test_an_adapter_of_the_command_line_that_cannot_be_loaded_stops_the_start(tiny_llama, folder):
    with ServerProcess(tiny_llama, "--enable-lora", "--lora-modules", f"big={folder / 'large'}") as server:
        assert server.exit_status() == 1
        log = server.log()
        server.assert_nothing_left()
    assert "start with --max-lora-rank 32" in log
    assert "Traceback" not in log
