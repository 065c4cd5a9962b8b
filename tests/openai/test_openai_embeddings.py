"""Embeddings over HTTP from the model of the catalogue, through the official client, with an IO processor beside."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import openai
from hardpoint.config import catalogue
from hardpoint.front_end.server.protocol.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from hardpoint.testing import RunningServer, project_plugin

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "io_processors"
TEXTS = ["A cat sits on the mat.", "The kitten is sitting on a rug.", "Share prices fell on Monday."]
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ '.' if dot }} {% endfor %}"
    "{{ 'loud' if loud }}{{ 'go' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    entry = catalogue.find("all-minilm-l6-v2")
    assert entry is not None
    return catalogue.pull(entry)


@pytest.fixture(scope="module")
def reference(folder) -> Any:
    """sentence-transformers' own vectors."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts, show_progress_bar=False)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory) -> Iterator[RunningServer]:
    plugin = project_plugin(EXAMPLE, tmp_path_factory.mktemp("meta"))
    flags = ["--served-model-name", "minilm", "--io-processor-plugin", "acme_io_processors"]
    flags += ["--chat-template", TEMPLATE]
    with RunningServer("all-minilm-l6-v2", flags, [plugin], {"HF_HUB_OFFLINE": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-4)


def ids_of(served: RunningServer, text: str) -> list[int]:
    return served.post("/tokenize", {"prompt": text}).body["tokens"]


def test_the_client_gets_the_vectors_of_sentence_transformers(client, reference):
    # The client asks for base64 by itself, and decodes it.
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    close([one.embedding for one in answer.data], reference(TEXTS))
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 10 + 8
    plain = client.embeddings.create(model="minilm", input=TEXTS[0], encoding_format="float")
    close(plain.data[0].embedding, reference(TEXTS[0]))


def test_inputs_of_every_kind(served, reference):
    def embed(**body: Any) -> list[Any]:
        answer = served.post("/v1/embeddings", body)
        assert answer.status == 200, answer.body
        return [one["embedding"] for one in answer.body["data"]]

    ids = [ids_of(served, text) for text in TEXTS[:2]]
    close(embed(input=ids[0])[0], reference(TEXTS[0]))
    close(embed(input=ids), reference(TEXTS[:2]))
    close(embed(messages=[{"role": "user", "content": TEXTS[2]}], add_special_tokens=True)[0], reference(TEXTS[2]))
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    close(embed(messages=conversations, add_special_tokens=True), reference(TEXTS))
    # What is cut off is the end of the text, not what the model expects around it.
    long = "mat " * 600
    close(embed(input=long, truncate_prompt_tokens=-1)[0], reference(long))
    not_unit = np.array(embed(input=TEXTS[0], use_activation=False)[0])
    close(not_unit / np.linalg.norm(not_unit), reference(TEXTS[0]))
    assert np.linalg.norm(not_unit) > 1.5


def test_numbers_in_other_forms(served, reference):
    body = {"input": TEXTS[:2], "encoding_format": "base64"}
    for dtype, endianness, read, exact in (
        ("float32", "little", "<f4", 1e-4), ("float16", "big", ">f2", 2e-3), ("bfloat16", "little", "<u2", 1e-2),
    ):  # fmt: skip
        answer = served.post("/v1/embeddings", {**body, "embed_dtype": dtype, "endianness": endianness})
        raw = np.frombuffer(base64.b64decode(answer.body["data"][1]["embedding"]), read)
        numbers = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else raw.astype(np.float32)
        np.testing.assert_allclose(numbers, reference(TEXTS[1]), atol=exact)
    assert served.post("/v1/embeddings", {**body, "embed_dtype": "fp8_e4m3"}).status == 400


def test_bytes(served, reference):
    import httpx

    body = {"input": TEXTS, "encoding_format": "bytes", "endianness": "little"}
    answer = httpx.post(f"{served.url}/v1/embeddings", json=body, trust_env=False)
    facts = json.loads(answer.headers["metadata"])
    assert answer.headers["content-type"] == "application/octet-stream"
    assert facts["usage"]["prompt_tokens"] == 27
    for one, expected in zip(facts["data"], reference(TEXTS), strict=True):
        close(np.frombuffer(answer.content[one["start"] : one["end"]], "<f4").reshape(one["shape"]), expected)
    bare = httpx.post(f"{served.url}/v1/embeddings", json={**body, "encoding_format": "bytes_only"}, trust_env=False)
    assert bare.content == answer.content
    assert "metadata" not in bare.headers


def test_raw_pooling(served, reference):
    whole = served.post("/pooling", {"input": TEXTS[0]}).body
    close(whole["data"][0]["data"], reference(TEXTS[0]))
    assert whole["id"].startswith("pool-")
    tokens = served.post("/pooling", {"input": TEXTS[0], "task": "token_embed", "use_activation": False}).body
    rows = np.array(tokens["data"][0]["data"])
    assert rows.shape == (9, 384)
    mean = rows.mean(axis=0)
    close(mean / np.linalg.norm(mean), reference(TEXTS[0]))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_cosines(served, reference, path):
    first, second, third = reference(TEXTS)
    answer = served.post(path, {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).body
    close([one["score"] for one in answer["data"]], [first @ second, first @ third])
    paired = served.post(path, {"queries": TEXTS[:2], "documents": TEXTS[1:]}).body
    close([one["score"] for one in paired["data"]], [first @ second, second @ third])
    assert paired["usage"]["prompt_tokens"] == 9 + 10 + 10 + 8
    cut = served.post(path, {"data_1": TEXTS[0], "data_2": TEXTS[1], "max_tokens_per_doc": 2}).body
    close(cut["data"][0]["score"], first @ reference("The kitten"))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered(served, reference, path):
    query, documents = "pets", [TEXTS[2], TEXTS[1], TEXTS[0]]
    answer = served.post(path, {"query": query, "documents": documents, "top_n": 2}).body
    scores = reference(documents) @ reference(query)
    order = list(np.argsort(-scores)[:2])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["document"]["text"] for one in answer["results"]] == [documents[index] for index in order]
    close([one["relevance_score"] for one in answer["results"]], scores[order])


def test_data_goes_through_the_io_processor(served, reference):
    answer = served.post("/pooling", {"data": {"texts": TEXTS}})
    assert answer.status == 200, answer.body
    assert answer.body.keys() == {"request_id", "created_at", "data"}
    dense = [one["dense"] for one in answer.body["data"]]
    close(dense, reference(TEXTS))
    sparse = answer.body["data"][0]["sparse"]
    assert {"cat", "sits", "mat"} <= sparse.keys()
    refused = served.post("/pooling", {"data": {"words": []}})
    assert (refused.status, refused.body["error"]["message"]) == (400, 'expected {"texts": ["...", ...]}')


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "either input or messages"),
    ("/v1/embeddings", {"input": []}, "input must be"),
    ("/v1/embeddings", {"input": [[]]}, "non-empty"),
    ("/v1/embeddings", {"input": [1, "a"]}, "texts or non-empty lists"),
    ("/v1/embeddings", {"input": "a", "dimensions": 8}, "may not be shortened"),
    ("/v1/embeddings", {"input": "mat " * 600}, "too long"),
    ("/v1/embeddings", {"input": [99999999]}, "outside the vocabulary"),
    ("/v1/embeddings", {"input": "a", "padding": "max_length"}, "padding is not supported"),
    ("/pooling", {"input": "a", "task": "classify"}, "does not support the task 'classify'"),
    ("/pooling", {"input": "a", "task": "plugin"}, "plugin"),
    ("/pooling", {"input": "a", "data": {}}, "one of input, messages and data"),
    ("/pooling", {"data": {}, "task": "embed"}, "data is for the task plugin"),
    ("/score", {"data_1": "a"}, "give one pair"),
    ("/score", {"data_1": ["a", "b"], "data_2": ["a", "b", "c"]}, "cannot be compared"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction is not supported"),
]


@pytest.mark.parametrize(("path", "body", "words"), REFUSED)
def test_what_cannot_be_done_is_a_400_with_the_reason(served, path, body, words):
    answer = served.post(path, body)
    assert answer.status == 400, answer.body
    assert words in answer.body["error"]["message"]
    assert answer.body["error"]["param"].split(".")[0] in MODELS[path].model_fields


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "mat " * 600}, "input"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "mat " * 600}]}, "messages"),
        ("/pooling", {"input": [99999999]}, "input"),
        ("/score", {"text_1": "a", "text_2": "mat " * 600}, "text_2"),
        ("/score", {"queries": ["a", "b"], "items": ["a", "b", "c"]}, "queries"),
        ("/rerank", {"query": "a", "documents": ["mat " * 600]}, "documents"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness"),
        ("/pooling", {"data": {"texts": ["a"]}, "dimensions": 8}, "dimensions"),
    ],
)
def test_a_refusal_names_the_clients_field(served, path, body, param):
    answer = served.post(path, body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body


# Field -> a value that is not the default, and what the request needs beside it.
COMMON: dict[str, Any] = {
    "model": ("nobody", {}), "user": ("u", {}), "truncate_prompt_tokens": (2, {}), "truncation_side":
    ("left", {"truncate_prompt_tokens": 3}), "padding": ("max_length", {}), "request_id": ("other", {}),
    "priority": (1, {}), "mm_processor_kwargs": ({"a": 1}, {}), "use_activation": (False, {}),
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "A cat"}], "input": None}
INPUTS: dict[str, Any] = {
    **COMMON,
    "input": ("A dog", {}), "add_special_tokens": (False, {}),
    "messages": ([{"role": "user", "content": "A dog"}], CHAT),
    "add_generation_prompt": (True, CHAT), "chat_template": ("x", CHAT),
    "continue_final_message": (True, {**CHAT, "chat_template_kwargs": {"dot": True}}),
    "chat_template_kwargs": ({"loud": True}, CHAT), "media_io_kwargs": ({"image": {}}, {}),
    "encoding_format": ("base64", {}), "embed_dtype": ("float16", {"encoding_format": "base64"}),
    "endianness": ("big", {"encoding_format": "base64"}), "dimensions": (8, {}),
}  # fmt: skip
PAIRS: dict[str, Any] = {
    **COMMON,
    "max_tokens_per_query": (1, {}), "max_tokens_per_doc": (1, {}), "instruction": ("x", {}),
    "chat_template_kwargs": ({"a": 1}, {}),
}  # fmt: skip
_NAMES = ("data_1", "data_2", "queries", "documents", "items", "text_1", "text_2")
BODIES: dict[str, Any] = {
    "/v1/embeddings": ({"input": "A cat sits here"}, INPUTS),
    "/pooling": ({"input": "A cat sits here"}, {**INPUTS, "task": ("token_embed", {}), "data": ({"texts": ["a"]}, {})}),
    "/score": ({"text_1": "A cat sits", "text_2": "A dog"}, {**PAIRS, **{name: ("a bird", {}) for name in _NAMES}}),
    "/rerank": (
        {"query": "A cat sits", "documents": ["A dog runs", "A cat"]},
        {**PAIRS, "query": ("a bird", {}), "documents": (["a", "b"], {}), "top_n": (1, {})},
    ),
}
MODELS = {
    "/v1/embeddings": EmbeddingRequest, "/pooling": PoolingRequest, "/score": ScoreRequest, "/rerank": RerankRequest,
}  # fmt: skip
# What no answer shows: it keeps cached prefixes apart.
UNSEEN = {"cache_salt"}


@pytest.mark.parametrize("path", BODIES)
def test_a_field_has_an_effect_or_is_refused_or_documented(served, path):
    base, probes = BODIES[path]
    assert set(probes) == set(MODELS[path].model_fields) - UNSEEN

    def seen(body: dict[str, Any]) -> Any:
        answer = served.post(path, {"request_id": "fixed", **body})
        shown = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
        return answer.status, re.sub(r'"created": \d+', "", shown)

    silent = []
    for name, (value, beside) in probes.items():
        body = {key: one for key, one in {**base, **beside}.items() if one is not None}
        without, (status, shown) = seen(body), seen({**body, name: value})
        assert without[0] == 200, (name, without)
        if status != 200:
            assert status in (400, 404), (name, shown)
            assert name in shown, f"{name} is refused in other words: {shown}"
        elif ((status, shown) == without) != (name in MODELS[path].rules.without_effect):
            silent.append(name)
    assert not silent, silent


def test_what_the_model_cannot_do_is_said(served):
    for path in ("/v1/completions", "/v1/chat/completions", "/classify"):
        answer = served.post(path, {"prompt": "a", "input": "a", "messages": []})
        assert answer.status == 501
        assert answer.body["error"]["message"].endswith(f"cannot answer {path}: it supports embed, token_embed")
    assert served.post("/v1/embeddings", {"model": "other", "input": "a"}).status == 404


def test_requests_are_counted(served):
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="minilm"}' in (
        served.get("/metrics").body
    )


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory) -> Iterator[tuple[RunningServer, Any]]:
    """A server on a random cross-encoder, and transformers' score of two texts with it."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = tmp_path_factory.mktemp("judge")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    model.save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        (place / name).write_bytes((folder / name).read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)

    def score(query: str, document: str) -> float:
        inputs = tokenizer(query, document, return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            return float(torch.sigmoid(model(**inputs).logits)[0, 0])

    with RunningServer(place, ["--served-model-name", "judge"], [], {"HF_HUB_OFFLINE": "1"}) as server:
        yield server, score


def test_a_cross_encoder_reads_both_texts_together(judge):
    server, score = judge
    answer = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    assert answer.status == 200, answer.body
    expected = [score(TEXTS[0], text) for text in TEXTS[1:]]
    close([one["score"] for one in answer.body["data"]], expected)
    ordered = server.post("/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).body["results"]
    assert [one["index"] for one in ordered] == list(np.argsort([-one for one in expected]))
    long = "mat " * 80
    cut = server.post("/score", {"text_1": "a cat", "text_2": long, "truncate_prompt_tokens": -1}).body
    close(cut["data"][0]["score"], score("a cat", long))
    assert server.post("/score", {"text_1": "a cat", "text_2": long}).status == 400


def test_classes(judge):
    server, _ = judge
    answer = server.post("/classify", {"input": TEXTS}).body
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert all(one["num_classes"] == 1 and one["label"] == "LABEL_0" for one in answer["data"])
    assert all(0 < one["probs"][0] < 1 for one in answer["data"])
    assert server.post("/v1/embeddings", {"input": "a"}).status == 501
