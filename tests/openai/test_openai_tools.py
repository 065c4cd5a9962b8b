"""Tools and reasoning through the official client, on a real server whose parsers come from files.

A tiny model writes no calls by itself: a logits processor writes `force_ids`, then lets it go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FORCE = """
from hardpoint.contracts.logits_processor import AdapterLogitsProcessor

class Force(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get("force_ids")
        if not forced:
            return None
        def write(output_ids, logits):
            if len(output_ids) < len(forced):
                wanted = int(forced[len(output_ids)])
                kept = logits[wanted].clone()
                logits.fill_(float("-inf"))
                logits[wanted] = kept
            return logits
        return write
"""
TOOL_FILE = """
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers import ToolParserManager

@ToolParserManager.register_module("toy_tool")
class ToyTool(Hermes2ProToolParser):
    pass

@ToolParserManager.register_module("unused")
class Other(Hermes2ProToolParser):
    pass
"""
REASON_FILE = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.qwen3_reasoning_parser import Qwen3ReasoningParser

@ReasoningParserManager.register_module("toy_reason")
class ToyReason(Qwen3ReasoningParser):
    pass
"""
ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}}}},
    {"type": "function", "function": {"name": "ok", "parameters": {
        "type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
        "additionalProperties": False}}},
]  # fmt: skip
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tools_server(start_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parser files")
    (folder / "force_text.py").write_text(FORCE)
    tool, reason = folder / "toy tool.py", folder / "reason.py"
    tool.write_text(TOOL_FILE)
    reason.write_text(REASON_FILE)
    return start_server(
        "--enable-auto-tool-choice", "--tool-call-parser", "toy_tool", "--tool-parser-plugin", str(tool),
        "--reasoning-parser", "toy_reason", "--reasoning-parser-plugin", str(reason),
        # The tiny model would write white space for ever.
        "--structured-outputs-config",
        '{"disable_any_whitespace": true}',
        "--logits-processors", "force_text:Force", "--served-model-name", "tiny",
        env={"PYTHONPATH": str(folder)},
    )  # fmt: skip


@pytest.fixture
def ask(tools_server, tiny_llama):
    """Arguments of a request that is answered with a text; `stop=False`: and then with what the model likes."""
    eos = json.loads((tiny_llama / "config.json").read_text())["eos_token_id"]

    def arguments(text, *, stop=True, **more):
        found = tools_server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        ids = [*found["tokens"], *([eos] if stop else [])]
        more.setdefault("max_completion_tokens", len(ids))
        extra = {"vllm_xargs": {"force_ids": ids}}
        return {"model": "tiny", "messages": USER, "extra_body": extra, "temperature": 0, **more}

    return arguments


def test_a_call_with_reasoning_and_content(tools_server, ask):
    text = f"<think>Let me see.</think>One moment.{CALL}"
    with tools_server.client() as client:
        answer = client.chat.completions.create(**ask(text, tools=TOOLS))
        message = answer.choices[0].message
        assert message.reasoning == "Let me see."
        assert message.content == "One moment."
        [call] = message.tool_calls
        assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0

        with client.chat.completions.stream(**ask(text, tools=TOOLS)) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion().choices[0]
        assert final.message.content == "One moment."
        [call] = final.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        thought = [chunk.choices[0].delta.model_extra.get("reasoning") for chunk in chunks if chunk.choices]
        assert "".join(filter(None, thought)) == "Let me see."


def test_the_call_and_its_result_go_back_to_the_model(tools_server, ask):
    with tools_server.client() as client:
        first = client.chat.completions.create(**ask(f"<think></think>{CALL}", tools=TOOLS)).choices[0].message
        call = first.tool_calls[0]
        history = [*USER, first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
        again = client.chat.completions.create(**ask("<think></think>It rains.", tools=TOOLS, messages=history))
        assert again.choices[0].message.content == "It rains."
        assert again.choices[0].message.tool_calls in (None, [])


def test_required_and_named_calls_are_valid_whatever_the_model_likes(tools_server, ask):
    named = {"type": "function", "function": {"name": "ok"}}
    with tools_server.client() as client:
        for choice in (named, "required"):
            given = ask(
                "<think>So.</think>",
                stop=False,
                tools=TOOLS[1:],
                tool_choice=choice,
                max_completion_tokens=80,
                parallel_tool_calls=False,
            )
            whole = client.chat.completions.create(**given).choices[0]
            with client.chat.completions.stream(**given) as stream:
                streamed = stream.get_final_completion().choices[0]
            for answer in (whole, streamed):
                assert answer.finish_reason in ("stop", "tool_calls"), answer
                assert answer.message.tool_calls[0].function.name == "ok"
                assert set(json.loads(answer.message.tool_calls[0].function.arguments)) == {"yes"}
            calls = [[c.function.arguments for c in one.message.tool_calls] for one in (whole, streamed)]
            assert calls[0] == calls[1]
        assert whole.message.model_extra["reasoning"] == "So."


def test_the_files_ran_once_in_each_process_that_reads_them(tools_server):
    entries = tools_server.http.get("/plugins").json()["ledger"]
    loads = [(e["role"].split("+")[0], e["key"]) for e in entries if e["kind"] == "load" and e["name"].endswith(".py")]
    assert sorted(loads) == [
        ("engine_core", "reasoning_parsers"), ("front_end", "reasoning_parsers"), ("front_end", "tool_parsers")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tool-parser-plugin", "{folder}/gone.py"], ["no file", "gone.py"]),
        (["--reasoning-parser-plugin", "{folder}/bad.py"], ["invalid syntax", "bad.py, line 2"]),
        (["--tool-parser-plugin", "{folder}/tool.py", "--tool-call-parser", "other"], ["registered toy_tool, unused"]),
        (["--headless", "--reasoning-parser-plugin", "{folder}/reason.py", "--reasoning-parser", "other"],
         ["registered toy_reason"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_an_error_of_the_start(tiny_llama, tmp_path, flags, says):
    (tmp_path / "bad.py").write_text("\ndef f(:\n")
    (tmp_path / "tool.py").write_text(TOOL_FILE)
    (tmp_path / "reason.py").write_text(REASON_FILE)
    flags = [flag.format(folder=tmp_path) for flag in flags]
    here = [] if "--headless" in flags else ["--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "hardpoint", "serve", str(tiny_llama), *here, *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode != 0
    for words in says:
        assert words in done.stdout + done.stderr
