"""Other people's tool and reasoning parsers, as they are, on fixed texts: whole, streamed, and on a server's way."""

from __future__ import annotations

import subprocess
import sys

from downstream_packages import folder_of

REGISTER = """
import importlib.metadata, json, sys
from types import SimpleNamespace as Record
from hardpoint import compat
assert compat.install()
def register(distribution):
    for point in importlib.metadata.distribution(distribution).entry_points:
        if point.group == "vllm.general_plugins":
            point.load()()
from vllm.tool_parsers import ToolParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.transformers_utils.tokenizer import get_tokenizer
tokenizer = get_tokenizer(sys.argv[1])
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}}
def asked(**more):
    given = dict(tools=[tool], tool_choice="auto", response_format=None, vllm_xargs=None, parallel_tool_calls=True,
                 include_reasoning=True, structured_outputs=None, skip_special_tokens=True)
    return Record(**{**given, **more})
"""


def run(plugin, source, tiny_llama):
    done = subprocess.run(
        [sys.executable, "-c", REGISTER + source, str(tiny_llama)],
        env={"PYTHONPATH": str(folder_of(plugin)), "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": ""},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# `city=Oslo` and `days=3` on lines of their own are RAIF-G for {"city": "Oslo", "days": 3}.
RAIF = """
register("raif-vllm")
text, arguments = "city=Oslo\\ndays=3", '{"city":"Oslo","days":3}'
whole = ToolParserManager.get_tool_parser("raif")(tokenizer).extract_tool_calls(text, asked())
assert [(c.function.name, c.function.arguments) for c in whole.tool_calls] == [("weather", arguments)]
parser = ToolParserManager.get_tool_parser("raif")(tokenizer)
said, calls = "", []
for piece in ("city=Os", "lo\\ndays=3", "\\n</raif>"):
    before, said = said, said + piece
    delta = parser.extract_tool_calls_streaming(before, said, piece, [], [], [], asked())
    calls += delta.tool_calls if delta else []
assert [call.function.name for call in calls if call.function.name] == ["weather"]
assert "".join(call.function.arguments or "" for call in calls) == arguments
structured = asked(tools=None, vllm_xargs={"raif_decl": "city:s?\\ndays:n?"})
reader = ReasoningParserManager.get_reasoning_parser("raif")(tokenizer)
assert reader.extract_reasoning(text, structured) == (None, arguments)

# Both together, as a server reads an answer.
from hardpoint.front_end.parsers.answers import Parsers
parsers = Parsers(tokenizer, tool_name="raif", tool_class=ToolParserManager.get_tool_parser("raif"), auto=True,
                  reasoning_name="raif", reasoning_class=ReasoningParserManager.get_reasoning_parser("raif"))
class Copied(Record):
    def model_copy(self, **_):
        return self
plan = parsers.plan(Copied(**vars(asked())))
assert plan.request.skip_special_tokens is False
plan.saw_prompt([1, 2, 3])
answer = plan.reader().whole(text, [])
assert (answer.content, answer.tool_calls[0].function.arguments) == (None, arguments)
reader = plan.reader()
deltas = [reader.feed(piece, []) for piece in ("city=Os", "lo\\ndays=3", "\\n</raif>")] + [reader.finish()]
calls = [call for delta in deltas if delta for call in delta.tool_calls]
assert "".join(call.function.arguments or "" for call in calls) == arguments and calls[0].id
assert reader.finish_reason("stop") == "tool_calls"
"""


def test_raif_reads_calls_and_structured_answers(tiny_llama):
    run("raif-vllm==0.2.0", RAIF, tiny_llama)


SPARK = """
import vllm_spark2_5_plugin as plugin
plugin._register_tool_parser()
cls = ToolParserManager.get_tool_parser("spark25")
text = ("Ok.\\n<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call> and on")
whole = cls(tokenizer, [tool]).extract_tool_calls(text, asked())
expected = [("weather", '{"city":"Oslo","days":3}')]
assert [(c.function.name, c.function.arguments) for c in whole.tool_calls] == expected
assert whole.content == "Ok.\\n and on"

from hardpoint.testing import check_tool_parser
check_tool_parser(cls, [text, "<tool_call>weather</tool_call><tool_call>weather</tool_call>"], [tool])
"""


def test_sparks_parser_keeps_the_contract(tiny_llama):
    run("vllm-spark2-5-plugin==0.1.0", SPARK, tiny_llama)


ALEPH = """
from aleph_alpha_inference.reasoning import Kolibri1ParserReasoningAdapter
ReasoningParserManager.register_lazy_module(
    name="kolibri1", module_path="aleph_alpha_inference.reasoning", class_name="Kolibri1ParserReasoningAdapter")
ToolParserManager.register_lazy_module(
    name="kolibri1", module_path="vllm.tool_parsers.hermes_tool_parser", class_name="Hermes2ProToolParser")
assert ReasoningParserManager.get_reasoning_parser("kolibri1") is Kolibri1ParserReasoningAdapter
call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
found = ToolParserManager.get_tool_parser("kolibri1")(tokenizer).extract_tool_calls(call, asked())
assert found.tool_calls[0].function.name == "weather"
for kwargs, text, expected in (
    ({}, "<think>a</think>b", ("a", "b")),
    ({"reasoning_effort": "high", "enable_thinking": False}, "a</think>b", ("a", "b")),
    ({"reasoning_effort": "none"}, "b", (None, "b")),
):
    parser = Kolibri1ParserReasoningAdapter(tokenizer, chat_template_kwargs=kwargs)
    assert parser.extract_reasoning(text, asked()) == expected, kwargs

from hardpoint.testing import check_reasoning_parser
check_reasoning_parser(Kolibri1ParserReasoningAdapter, ["<think>a</think>b", "a</think>b", "<think>a"])
"""


def test_kolibris_parsers_derive_from_our_engines(tiny_llama):
    run("aleph-alpha-inference==1.0.0", ALEPH, tiny_llama)


RAIF_SERVER = """
register("raif-vllm")
import asyncio
from hardpoint.front_end.server.serving.chat import ChatService
from hardpoint.front_end.server.protocol.chat import ChatCompletionRequest
form = {"type": "json_schema", "json_schema": {"name": "w", "schema": tool["function"]["parameters"]}}
request = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], response_format=form)
class Prompts:
    async def of_chat(self, request):
        return request
class Service(ChatService):
    def __init__(self):
        self._prompts = Prompts()
seen = asyncio.run(Service().render_chat_request(request))
assert "<schema>" in json.dumps(seen.messages), seen.messages
assert seen.response_format is None and seen.vllm_xargs["raif_decl"]
"""


def test_raif_changes_a_request_before_its_conversation_is_rendered(tiny_llama):
    run("raif-vllm==0.2.0", RAIF_SERVER, tiny_llama)
