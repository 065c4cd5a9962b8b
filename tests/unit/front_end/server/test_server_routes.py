"""The other routes: models, tokenizer, health, developer routes, plugins, page, docs."""

from __future__ import annotations

import asyncio
import logging

import pytest

from hardpoint import __version__
from hardpoint.errors import EngineDeadError
from hardpoint.front_end.server.protocol.models import ModelCard, ModelPermission
from process_tools import happens


def test_models_list_every_served_name(make_server, run):
    async def check():
        server = await make_server()
        body = (await server.http.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [card["id"] for card in body["data"]] == ["tiny", "alias"]
        for card in body["data"]:
            assert set(card) == set(ModelCard.model_fields)
            assert set(card["permission"][0]) == set(ModelPermission.model_fields)
            assert (card["owned_by"], card["root"], card["parent"], card["max_model_len"]) == ("vllm", "tiny", None, 64)
        assert (await server.http.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await server.http.get("/v1/models/none")).status_code == 404

    run(check())


def test_tokenize_and_back(make_server, ids, run):
    async def check():
        server = await make_server()
        body = (await server.post("/tokenize", {"prompt": "hello world", "return_token_strs": True})).json()
        assert body == {
            "count": 2,
            "max_model_len": 64,
            "tokens": ids("hello world"),
            "token_strs": ["hello", "Ġworld"],
        }
        assert (await server.post("/tokenize", {"prompt": "hi"})).json()["token_strs"] is None
        chat = (await server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json()
        back = (await server.post("/detokenize", {"tokens": chat["tokens"]})).json()
        assert back == {"prompt": "<|user|>x\n<|assistant|>"}

    run(check())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "media_io_kwargs": {"a": {}}},
            "media_io_kwargs",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_tokenizer_routes_refuse_by_name(make_server, run, path, body, param):
    async def check():
        answer = await (await make_server()).post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    run(check())


def test_tokenizer_info_needs_its_flag(make_server, run):
    async def check():
        assert (await (await make_server()).http.get("/tokenizer_info")).status_code == 404
        server = await make_server(enable_tokenizer_info_endpoint=True)
        body = (await server.http.get("/tokenizer_info")).json()
        assert body["tokenizer_class"] == "Tokenizer"
        assert body["made"] == "by hand"
        assert "messages" in body["chat_template"]

    run(check())


def test_health_follows_the_engine(make_server, run):
    async def check():
        server = await make_server()
        for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
            server.engine.death = None
            answer = await server.http.request(method, path)
            assert (answer.status_code, answer.content) == (200, b"")
            server.engine.death = EngineDeadError("it fell over")
            answer = await server.http.request(method, path)
            assert answer.status_code == 503
            assert "it fell over" in answer.json()["error"]["message"]
        server.app.state.engine_client = None
        assert (await server.http.get("/health")).status_code == 200

    run(check())


def test_small_facts(make_server, run):
    async def check():
        server = await make_server()
        assert (await server.http.get("/version")).json() == {"version": __version__}
        assert (await server.http.get("/load")).json() == {"server_load": 0}
        assert (await server.http.get("/kv_event_sources")).json() == {}

    run(check())


def test_metrics_have_web_and_plugin_families(make_server, run):
    async def check():
        server = await make_server()
        await server.complete(prompt="hi")
        await server.http.get("/nothing/at/all")
        for path in ("/metrics", "/metrics/anything"):
            answer = await server.http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain")
        text = answer.text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}' in text
        assert 'http_requests_total{handler="none",method="GET",status="4xx"}' in text
        assert "http_request_duration_seconds_bucket" in text
        assert "http_response_size_bytes_sum" in text
        assert "hardpoint:plugin_load" in text
        assert 'handler="/metrics"' not in text
        assert "/nothing" not in text

    run(check())


def test_page_is_open_and_says_nothing_secret(make_server, run):
    async def check():
        server = await make_server(api_key=["k"])
        answer = await server.http.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "tiny" not in answer.text

    run(check())


def test_docs_unless_switched_off(make_server, run):
    async def check():
        server = await make_server()
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(paths)
        assert (await server.http.get("/docs")).status_code == 200
        silent = await make_server(disable_fastapi_docs=True)
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await silent.http.get(path)).status_code == 404

    run(check())


def test_generation_routes_need_the_task(make_server, run):
    import argparse

    from hardpoint.front_end.server.app import build_app

    generation, pooling = {"/v1/completions", "/v1/chat/completions"}, {"/v1/embeddings", "/score", "/pooling"}
    for tasks, has in ((("embed",), pooling), (("generate",), generation)):
        paths = build_app(argparse.Namespace(), tasks).openapi()["paths"].keys()
        assert "/v1/models" in paths
        assert paths & (generation | pooling) == has


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v2/rerank"])
def test_what_the_model_cannot_answer_is_said(make_server, run, path):
    async def check():
        answer = await (await make_server()).post(path, {"input": "a"})
        assert answer.status_code == 501
        assert "it supports generate; start the server with --runner pooling" in answer.json()["error"]["message"]

    run(check())


# -- developer routes ---------------------------------------------------------------------------------

DEV = [
    ("GET", "/server_info"), ("POST", "/reset_prefix_cache"), ("POST", "/collective_rpc"), ("POST", "/sleep"),
    ("GET", "/is_sleeping"), ("POST", "/pause"), ("POST", "/abort_requests"), ("GET", "/get_world_size"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), DEV)
def test_developer_routes_need_the_variable(make_server, run, method, path):
    async def check():
        assert (await (await make_server()).http.request(method, path)).status_code == 404

    run(check())


@pytest.fixture
def dev_server(make_server, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    return make_server


def test_collective_rpc(dev_server, run):
    async def check():
        server = await dev_server()
        body = {"method": "do", "args": [1], "kwargs": {"a": 2}, "timeout": 3}
        answer = await server.post("/collective_rpc", body)
        assert answer.json() == {"results": [{"rank": 0}, "7", None]}
        assert ("collective_rpc", "do", 3, (1,), {"a": 2}) in server.engine.calls
        for bad in ({}, {"method": ""}, {"method": "x", "args": {}}, {"method": "x", "timeout": 0}):
            refused = await server.post("/collective_rpc", bad)
            assert (refused.status_code, set(refused.json())) == (400, {"error"})

    run(check())


def test_cache_and_world(dev_server, run):
    async def check():
        server = await dev_server()
        answer = await server.http.post("/reset_prefix_cache?reset_running_requests=true&reset_external=1")
        assert answer.json() == {"success": True}
        assert ("reset_prefix_cache", True, True) in server.engine.calls
        assert (await server.http.get("/get_world_size")).json() == {"world_size": 1}
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await server.http.get("/is_paused")).json() == {"is_paused": False}

    run(check())


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/release_kv_cache_memory",
        "/reset_mm_cache",
        "/init_weight_transfer_engine",
        "/update_weights",
    ],
)
def test_what_the_engine_cannot_do_is_501(dev_server, run, path):
    async def check():
        answer = await (await dev_server()).http.post(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (501, "NotImplementedError")

    run(check())


def test_query_values_are_checked(dev_server, run):
    async def check():
        server = await dev_server()
        for path in ("/sleep?level=3", "/pause?mode=gently", "/sleep?level=x"):
            answer = await server.http.post(path)
            assert answer.status_code == 400, path

    run(check())


def test_abort_by_id_or_all(dev_server, ids, run):
    async def check():
        server = await dev_server(script=lambda p, i: ids("abcdefgh" * 7))
        server.engine.next_step = asyncio.Event().wait
        tasks = [
            asyncio.create_task(server.post("/v1/completions", body, headers={"X-Request-Id": name}))
            for name, body in (
                ("a", {"prompt": "x", "max_tokens": 50}),
                ("b", {"prompt": ["x", "y"], "max_tokens": 50}),
            )
        ]
        await happens(lambda: len(server.engine.requests) == 3)
        one = await server.post("/abort_requests", {"request_ids": ["cmpl-a", "unknown"]})
        assert one.json() == {"status": "aborted", "aborted": 1}
        assert (await tasks[0]).json()["choices"][0]["finish_reason"] == "abort"
        assert (await server.http.post("/abort_requests")).json() == {"status": "aborted", "aborted": 2}
        assert [choice["finish_reason"] for choice in (await tasks[1]).json()["choices"]] == ["abort", "abort"]
        assert (await server.http.post("/abort_requests")).json()["aborted"] == 0

    run(check())


def test_server_info_hides_secrets(dev_server, run, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")

    async def check():
        server = await dev_server()
        server.app.state.vllm_config = {"hf_token": "very-secret", "tokenizer": "tiny", "max_num_batched_tokens": 5}
        for form in ("text", "json"):
            answer = await server.http.get(
                f"/server_info?config_format={form}", headers={"Authorization": "Bearer very-secret"}
            )
            assert answer.status_code == 200
            assert "very-secret" not in answer.text
            assert set(answer.json()) == {"vllm_config", "vllm_env", "system_env"}
        assert answer.json()["vllm_config"]["tokenizer"] == "tiny"
        assert answer.json()["vllm_config"]["max_num_batched_tokens"] == 5

    run(check())


def test_lora_routes_refuse_where_there_are_no_adapters(make_server, run, monkeypatch):
    async def check():
        assert (await (await make_server()).post("/v1/load_lora_adapter", {})).status_code == 404
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        server = await make_server()
        for path, status in (("/v1/load_lora_adapter", 400), ("/v1/unload_lora_adapter", 404)):
            assert (await server.post(path, {"lora_name": "a", "lora_path": "/b"})).status_code == status

    run(check())


# -- /plugins -----------------------------------------------------------------------------------------


def test_plugins_merge_the_ledgers_of_all_processes(make_server, run):
    from hardpoint.extensions.ledger import Origin, ledger

    async def get_ledger():
        return [
            {
                "seq": 0, "time": 1.0, "pid": 4242, "role": "engine_core", "kind": "load", "key": "general",
                "name": "acme", "origin": {"distribution": "acme"}, "duration_s": 0.1, "detail": "",
            }
        ]  # fmt: skip

    async def check():
        server = await make_server()
        server.engine.get_ledger = get_ledger
        ledger.record("load", "general", "acme", origin=Origin("acme", "1.0"))
        body = (await server.http.get("/plugins")).json()
        assert {process["role"] for process in body["processes"]} >= {"engine_core"}
        assert [entry["name"] for entry in body["ledger"] if entry["kind"] == "load"] == ["acme", "acme"]
        assert {group["group"] for group in body["groups"]} >= {"vllm.general_plugins", "vllm.endpoint_plugins"}
        models = next(one for one in body["registries"] if one["key"] == "models")
        assert any(entry["name"] == "LlamaForCausalLM" and entry["built_in"] for entry in models["entries"])
        # Asked twice, merged once.
        assert len((await server.http.get("/plugins")).json()["ledger"]) == len(body["ledger"])

    run(check())


def test_plugins_answer_after_the_engine_ended(make_server, run):
    async def get_ledger():
        raise EngineDeadError()

    async def check():
        server = await make_server()
        server.engine.get_ledger = get_ledger
        assert (await server.http.get("/plugins")).status_code == 200

    run(check())


# -- the log ------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog):
    logging.getLogger("hardpoint").propagate = True
    caplog.set_level("INFO", logger="hardpoint")
    return caplog


def test_requests_and_outputs_are_logged_on_request(make_server, run, log):
    async def check():
        await (await make_server()).complete(prompt="private words")
        assert "private" not in log.text
        server = await make_server(enable_log_requests=True, enable_log_outputs=True, max_log_len=7)
        await server.complete(prompt="private words")
        await server.events("/v1/completions", prompt="x")
        assert "'private'" in log.text
        assert "private w" not in log.text
        assert "'hello w'" in log.text

    run(check())


def test_unknown_fields_are_named_once(make_server, run, log):
    async def check():
        server = await make_server()
        for _ in range(2):
            await server.complete(prompt="hi", brand_new_field=1)
        said = [record for record in log.records if "brand_new_field" in record.getMessage()]
        assert [record.levelname for record in said] == ["WARNING"]

    run(check())
