"""Clients other than the official one, each in a process of its own: their imports are not this suite's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = "tiny"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tooled(start_server):
    return start_server(
        "--served-model-name", MODEL, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        # A random model would go on with spaces for as long as it may.
        "--structured-outputs-config", json.dumps({"disable_any_whitespace": True}),
    )  # fmt: skip


@pytest.fixture
def run(tooled, tmp_path):
    """Run a script with URL, KEY, MODEL, WEATHER and SCHEMA; gives what it printed, line by line."""

    def script(source: str) -> list[str]:
        names = {"URL": f"{tooled.url}/v1", "KEY": tooled.key, "MODEL": MODEL, "WEATHER": WEATHER, "SCHEMA": SCHEMA}
        head = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        environment = {
            **os.environ, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false",
            "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", head + source], env=environment, capture_output=True, text=True, timeout=240,
            check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    return script


def test_litellm(run):
    whole, streamed, call, structured = run("""
import json, litellm
common = dict(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, temperature=0)
ask = [{"role": "user", "content": "Hi"}]
print(json.dumps(litellm.completion(messages=ask, max_tokens=6, **common).choices[0].message.content))
stream = litellm.completion(messages=ask, max_tokens=6, stream=True, **common)
print(json.dumps("".join(chunk.choices[0].delta.content or "" for chunk in stream)))
answer = litellm.completion(messages=ask, tools=[WEATHER], tool_choice="required", max_tokens=200, **common)
called = answer.choices[0].message.tool_calls[0].function
print(json.dumps([called.name, json.loads(called.arguments)]))
form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
answer = litellm.completion(messages=ask, response_format=form, max_tokens=60, **common)
print(answer.choices[0].message.content.replace("\\n", " "))
""")
    assert json.loads(whole) == json.loads(streamed)
    name, arguments = json.loads(call)
    assert (name, set(arguments)) == ("get_weather", {"unit"})
    assert set(json.loads(structured)) == {"sure"}


def test_langchain(run):
    whole, streamed, call, structured = run("""
import json
from langchain_openai import ChatOpenAI
model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=60)
print(json.dumps(model.invoke("Hi").content))
print(json.dumps("".join(chunk.content for chunk in model.stream("Hi"))))
bound = model.bind_tools([WEATHER], tool_choice="required")
print(json.dumps(bound.invoke("Hi").tool_calls))
shaped = model.with_structured_output({"title": "answer", **SCHEMA}, method="json_schema", strict=True)
print(json.dumps(shaped.invoke("Hi")))
""")
    assert json.loads(whole) == json.loads(streamed)
    assert next((one["name"], set(one["args"])) for one in json.loads(call)) == ("get_weather", {"unit"})
    assert set(json.loads(structured)) == {"sure"}


def test_llm(run, tooled, tmp_path):
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: {MODEL}\n  api_base: {tooled.url}/v1\n  api_key_name: ours\n"
        "  can_stream: true\n  supports_tools: true\n  supports_schema: true\n",
        encoding="utf-8",
    )
    (tmp_path / "keys.json").write_text(json.dumps({"ours": tooled.key}), encoding="utf-8")
    whole, streamed, structured = run("""
import json, llm
model = llm.get_model("here")
print(json.dumps(model.prompt("Hi", stream=False, max_tokens=6, temperature=0).text()))
print(json.dumps("".join(model.prompt("Hi", stream=True, max_tokens=6, temperature=0))))
print(model.prompt("Hi", schema=SCHEMA, max_tokens=60, temperature=0, stream=False).text().replace("\\n", " "))
""")
    assert json.loads(whole) == json.loads(streamed)
    assert set(json.loads(structured)) == {"sure"}


def test_anthropic(run):
    whole, streamed, call, counted = run("""
import json, anthropic
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
common = dict(model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"temperature": 0})
answer = client.messages.create(max_tokens=6, system="Be brief.", **common)
print(json.dumps(answer.content[0].text))
with client.messages.stream(max_tokens=6, system="Be brief.", **common) as stream:
    print(json.dumps("".join(stream.text_stream)))
    assert stream.get_final_message().usage.output_tokens == 6
tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
with client.messages.stream(max_tokens=200, tools=[tool], tool_choice={"type": "any"}, **common) as stream:
    message = stream.get_final_message()
assert message.stop_reason == "tool_use", message
print(json.dumps([[block.name, block.input] for block in message.content]))
print(client.messages.count_tokens(model=MODEL, messages=common["messages"]).input_tokens)
""")
    assert json.loads(whole) == json.loads(streamed)
    name, arguments = json.loads(call)[0]
    assert (name, set(arguments)) == ("get_weather", {"unit"})
    assert int(counted) > 0


def test_what_the_clients_are_is_pinned():
    """Each of them is a dependency of the tests, so that none of the above is left out."""
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{name}>=' in text for name in ("anthropic", "langchain-openai", "litellm", "llm", "openai"))
