"""Constraints on a real server: odd ones are answered with 400 and a reason, and hurt nobody else."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import re

import jsonschema
import psutil
import pytest

from openai import BadRequestError, OpenAI
from server_process import ServerProcess

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def served(tiny_llama):
    flags = ["--max-model-len", "512", "--structured-outputs-config.max_choices", "5000"]
    server = ServerProcess(tiny_llama, *flags)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def complete(served, **body):
    body = {"model": "m", "prompt": "Once", "max_tokens": 200, "temperature": 1.0, "seed": 5, **body}
    return served.http.post("/v1/completions", json=body)


ODD = {
    "json_object false": {"json_object": False},
    "empty text": {"json": ""},
    "half a schema": {"json": "{"},
    "a type that is none": {"json": {"type": "nope"}},
    "a ref to nowhere": {"json": {"$ref": "#/$defs/no"}},
    "a ref elsewhere": {"json": {"$ref": "https://example.com/schema.json"}},
    "a ref to itself": {"json": {"$ref": "#"}},
    "a ref around": {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "nested deep": {"json": nested(450)},
    "no choice": {"choice": []},
    "an open group": {"regex": "("},
    "a repeated repetition": {"regex": "(a+)+$"},
    "many values": {"json": {"enum": [f"value {i}" for i in range(20_000)]}},
    "two kinds": {"json": {"type": "string"}, "regex": "a"},
    "nothing satisfies it": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "a huge regex": {"regex": "a" * 600_000},
    "a regex nobody can count": {"regex": "((a{1,999}){1,999}){1,999}b" * 20},
    "looking ahead": {"regex": "(?=a)b"},
    "no json at all": {"json": 5},
}


def test_odd_constraints_are_the_clients_mistake_and_hurt_nobody(served):
    def stream(prompt):
        body = {"model": "m", "prompt": prompt, "max_tokens": 300, "stream": True, "ignore_eos": True}
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines[:-1]]

    assert complete(served, structured_outputs={"choice": ["a"]}).status_code == 200
    before = psutil.Process(served.process.pid).memory_info().rss
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, f"Stream {place}") for place in range(2)]
        answers = dict(
            zip(ODD, pool.map(lambda one: complete(served, structured_outputs=one), ODD.values()), strict=True)
        )
        answers["no schema"] = complete(served, response_format={"type": "json_schema", "json_schema": {"name": "n"}})
        ended = [future.result() for future in streams]
    for name, answer in answers.items():
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert len(error["message"]) > 10, name
        assert error["param"].startswith(("structured_outputs", "response_format")), (name, error)
    for chunks in ended:
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert served.http.get("/health").status_code == 200
    assert complete(served, structured_outputs={"choice": ["b"]}).json()["choices"][0]["text"] == "b"
    assert psutil.Process(served.process.pid).memory_info().rss - before < 100 << 20


KEYWORDS = {
    "pattern": {"type": "string", "pattern": "^(?=x)y"},
    "pattern inside": {"type": "array", "items": {"type": "string", "pattern": r"\bword\b"}, "maxItems": 2},
    "a good pattern": {"type": "string", "pattern": "^[a-c]{1,5}$"},
    "date-time": {"type": "string", "format": "date-time"},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "a fraction": {"type": "number", "multipleOf": 0.01},
    "uniqueItems": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
    "patternProperties": {
        "type": "object", "patternProperties": {"^a[0-9]$": {"type": "boolean"}}, "additionalProperties": False,
        "maxProperties": 2,
    },
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"maxLength": 3}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "contains": {"type": "array", "contains": {"type": "integer"}},
}  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_an_answer_satisfies_its_schema_or_the_refusal_names_the_keyword(served, name):
    schema = KEYWORDS[name]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = complete(served, response_format=form)
    if answer.status_code == 400:
        words = [word for word in (*schema, *schema.get("items", {})) if word not in ("type", "items")]
        assert any(word in answer.json()["error"]["message"] for word in (*words, "look")), answer.text
        return
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["text"]), schema)
        if schema.get("format"):
            datetime.datetime.fromisoformat(json.loads(choice["text"]))
    else:
        assert choice["finish_reason"] == "length"


def test_white_space_is_bounded(served):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    # Whatever the model likes best: here, white space.
    spaces = {str(token): 100.0 for token in served.http.post(
        "/tokenize", json={"model": "m", "prompt": " \n", "add_special_tokens": False}
    ).json()["tokens"]}  # fmt: skip
    body = {"response_format": form, "logit_bias": spaces, "max_tokens": 60, "temperature": 0.0}
    (choice,) = complete(served, **body).json()["choices"]
    longest = max(map(len, re.findall(r"\s+", choice["text"])))
    assert choice["text"].strip().startswith("{")
    assert 10 < longest <= 20, repr(choice["text"])


def test_a_stream_with_a_wrong_constraint_has_a_status_of_its_own(served):
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "messages": messages, "stream": True, "structured_outputs": {"regex": "["}}
    answer = served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "regex" in answer.json()["error"]["message"]


# What no text can follow, or is no grammar at all -> words of the reason.
GRAMMARS = {
    "root ::= root": "no text can satisfy it",
    "start: start": "no text can satisfy it",
    "root ::= x\nx ::= y\ny ::= x": "no text can satisfy it",
    "start: A\nA: A 'b'": "xgrammar: EBNF lexer error at line 1",
    "root ::= foo": "Rule 'foo' not found",
    'start: "a" foo': 'unknown name: "foo"',
    "((((": "Expected name at line 1",
}


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_grammar_that_cannot_be_kept_is_refused_in_words(served, grammar):
    answer = complete(served, structured_outputs={"grammar": grammar})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "structured_outputs")
    assert GRAMMARS[grammar] in error["message"]
    assert not re.search("Bias|RuntimeError|/project|<path>|0x", error["message"])


def test_a_grammar_that_begins_with_itself_is_kept(served):
    for grammar in ('root ::= root "a" | "b"', 'start: start "a" | "b"', 'root ::= x\nx ::= x "a" | "b" | ""'):
        answer = complete(served, structured_outputs={"grammar": grammar}, max_tokens=8)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch("b?a*", answer.json()["choices"][0]["text"])


def test_the_official_client_parses(served):
    from pydantic import BaseModel

    class Thing(BaseModel):
        flag: bool
        kind: str | None
        sizes: list[int]

    client = OpenAI(base_url=f"{served.http.base_url}/v1", api_key="x", max_retries=0)
    messages = [{"role": "user", "content": "A thing"}]
    extra = {"structured_outputs": {"disable_any_whitespace": True}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="m", messages=messages, seed=seed, max_completion_tokens=120, extra_body=extra,
            response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": Thing.model_json_schema()}},
        )  # fmt: skip
        if answer.choices[0].finish_reason == "stop":
            Thing.model_validate_json(answer.choices[0].message.content)
    short = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA, "strict": True}}
    with client.chat.completions.stream(
        model="m", messages=messages, response_format=short, extra_body=extra
    ) as stream:
        said = stream.get_final_completion().choices[0]
    assert said.finish_reason == "stop"
    jsonschema.validate(json.loads(said.message.content), SCHEMA)
    bad = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequestError, match="uniqueItems"):
        client.chat.completions.create(model="m", messages=messages, response_format=bad)


def test_the_ledger_says_which_backend_keeps_what(served):
    complete(served, structured_outputs={"choice": ["a"]})
    entries = served.http.get("/plugins").json()["ledger"]
    said = {(one["name"], one["detail"]) for one in entries if one["key"] == "structured_output_backends"}
    assert ("auto", "choice is kept by guidance") in said
    assert ("guidance", "choice is kept by guidance") in said


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("nothing", "use one of auto, guidance, xgrammar"), ("xgrammar", "hardpoint[structured-outputs]")],
)
def test_a_backend_that_cannot_be_used_stops_the_start(tiny_llama, tmp_path, backend, reason):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'xgrammar' else find(name, *rest)\n"
    )
    flags = ["--structured-outputs-config", json.dumps({"backend": backend})]
    server = ServerProcess(tiny_llama, *flags, env={"PYTHONPATH": str(tmp_path)})
    try:
        assert server.process.wait(60) != 0
        log = server.log()
        assert backend in log
        assert reason in log
    finally:
        server.close()
