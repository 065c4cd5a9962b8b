"""What each family of models writes, and what it means: whole, and as streams cut at every place."""

# ruff: noqa: RUF001, E501 - the bars of these models are wide, and so are their texts

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.extensions.builtins import BUILTINS
from hardpoint.extensions.registry import registry
from hardpoint.front_end.parsers.calls import CallFormat
from hardpoint.front_end.parsers.format_parser import FormatToolParser
from hardpoint.front_end.parsers.json_calls import JsonCalls
from hardpoint.front_end.parsers.json_text import JsonReader
from hardpoint.front_end.parsers.mistral_calls import new_mistral_id
from hardpoint.front_end.parsers.pythonic_calls import read_call
from hardpoint.front_end.parsers.xml_calls import typed
from hardpoint.front_end.tokenizers.detokenizer import detokenizer_for
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer, TokenizerParts

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}}}},
]  # fmt: skip
# Quotes, a character outside the basic plane, nested values, brackets in a text.
A = '{"city": "Os\\"lo }] 𝄞 ☃", "days": 3, "where": {"x": [1, {"y": null}]}}'
W = {"city": 'Os"lo }] 𝄞 ☃', "days": 3, "where": {"x": [1, {"y": None}]}}
J = f'{{"name": "weather", "arguments": {A}}}'
P = f'{{"name": "weather", "parameters": {A}}}'
N = '{"name": "noop", "arguments": {}}'
BOTH = [("weather", W), ("noop", {})]
CITY = 'Os"lo }] 𝄞 ☃'
XML = '<parameter=city>\n{}\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=where>\n{{"x": [1, {{"y": null}}]}}\n</parameter>'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"

# parser, the model's text, the content, the calls (arguments as values; as a text where they are no JSON)
GOLDEN = [
    ("hermes", f"Let me see.\n<tool_call>\n{J}\n</tool_call>\n<tool_call>\n{N}\n</tool_call>", "Let me see.", BOTH),
    ("hermes", f"<tool_call>{J}</tool_call>\nDone.", "Done.", [("weather", W)]),
    ("hermes", f"One.\n<tool_call>{N}</tool_call>\nTwo.", "One.\nTwo.", [("noop", {})]),
    ("hermes", f"<tool_call>{J[:-1]}</tool_call>", "", [("weather", W)]),
    ("hermes", f"<tool_call>{J}}}</tool_call>", "", [("weather", W)]),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {"a": "x\ny", "b": True}}</tool_call>', "",
     [("f", {"a": "x\ny", "b": True})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call> then', "then", [("f", '{"a": ]}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "b', "", [("f", '{"a": [1, "b')]),
    ("hermes", f"a <tool_call>no</tool_call> <tool_call>{N}</tool_call>", "a <tool_call>no</tool_call>", [("noop", {})]),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", "  if a <tool_ca", "  if a <tool_ca", []),
    ("llama3_json", f"{P}; {P}", "", [("weather", W)] * 2),
    ("llama3_json", f"<|python_tag|>{P}", "", [("weather", W)]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    ("llama3_json", '{"answer": {"name": 1}}', '{"answer": {"name": 1}}', []),
    ("llama3_json", f"Say {P}", f"Say {P}", []),
    ("llama4_json", P, "", [("weather", W)]),
    ("mistral", f"Sure.[TOOL_CALLS] [{J}, {N}]", "Sure.", BOTH),
    ("mistral", f"[TOOL_CALLS]weather{A}[TOOL_CALLS]noop{{}}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{A}", "", [("weather", W)]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{A}", "", [("weather", W)]),
    ("granite", f"<|tool_call|>[{J}, {N}]", "", BOTH),
    ("granite", f"<tool_call>[{J}]", "", [("weather", W)]),
    ("granite-20b-fc", f"<function_call> {J} <function_call> {N}", "", BOTH),
    ("internlm", f"Hm.<|action_start|><|plugin|>\n{P}<|action_end|>\n", "Hm.", [("weather", W)]),
    ("jamba", f"<tool_calls>[\n  {J},\n  {N}\n]</tool_calls>", "", BOTH),
    ("hunyuan_a13b", f"So.\n<tool_calls>[{J}, {N}]</tool_calls>", "So.", BOTH),
    ("minimax", f"<tool_calls>\n{J}\n{N}\n</tool_calls>", "", BOTH),
    ("phi4_mini_json", f"functools[{J}, {N}]", "", BOTH),
    ("xlam", f"[{J}, {N}]", "", BOTH),
    ("xlam", f"So:\n```json\n[{J}]\n```\nEnd.", "So:\nEnd.", [("weather", W)]),
    ("xlam", f"<tool_call>[{J}]</tool_call>", "", [("weather", W)]),
    ("xlam", "[1, 2]", "[1, 2]", []),
    ("ernie45", f"<response>\nHi.\n</response>\n\n<tool_call>\n{J}\n</tool_call>\n", "Hi.", [("weather", W)]),
    ("longcat", f"<longcat_tool_call>{J}</longcat_tool_call>", "", [("weather", W)]),
    ("deepseek_v3", f"Hm<｜tool▁calls▁begin｜>{V3.format('weather', A)}\n{V3.format('noop', '{}')}<｜tool▁calls▁end｜>",
     "Hm", BOTH),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{A}<｜tool▁call▁end｜>"
     "<｜tool▁call▁begin｜>noop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", BOTH),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
     f'<｜DSML｜parameter name="city" string="true">{CITY}</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
     '<｜DSML｜parameter name="where" string="false">{"x": [1, {"y": null}]}</｜DSML｜parameter>\n'
     '</｜DSML｜invoke>\n<｜DSML｜invoke name="noop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', "", BOTH),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     f"{A}<|tool_call_end|><|tool_call_begin|>functions.noop:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "", BOTH),
    ("glm45", f"Ok.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n<arg_key>days</arg_key>"
     '\n<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"x": [1, {"y": null}]}</arg_value>\n</tool_call>'
     "\n<tool_call>noop\n</tool_call>", "Ok.", BOTH),
    ("glm45", f"<tool_call>{J}</tool_call>", f"<tool_call>{J}</tool_call>", []),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>[1]</arg_value></tool_call>", "", [("f", {"a": [1]})]),
    ("qwen3_coder", f"<tool_call>\n<function=weather>\n{XML.format(CITY)}\n</function>\n</tool_call>\n"
     "<tool_call>\n<function=noop>\n</function>\n</tool_call>", "", BOTH),
    ("qwen3_coder", f"<function=weather>\n{XML.format(CITY)}\n</function>\n</tool_call>", "", [("weather", W)]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n\n2\n</parameter>\n</tool_call>", "",
     [("f", {"a": "1\n\n2"})]),
    ("qwen3_coder", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    ("qwen3_xml", "<tool_call><function=f></function></tool_call>", "", [("f", {})]),
    ("step3p5", "<tool_call><function=f></function></tool_call>", "", [("f", {})]),
    ("seed_oss", f"<seed:tool_call>\n<function=weather>\n{XML.format(CITY)}\n</function>\n</seed:tool_call>", "",
     [("weather", W)]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
     '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="noop">\n</invoke>\n</minimax:tool_call>', "",
     [("weather", {"city": "Oslo", "days": 3}), ("noop", {})]),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
     '<steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>', "",
     [("weather", {"days": 3})]),
    ("pythonic", '[weather(city="Os\\"lo }] 𝄞 ☃", days=3, where={"x": [1, {"y": None}]}), noop()]', "", BOTH),
    ("pythonic", "[a.b(x=-1.5, y=true, z=(1, 'q'))]", "", [("a.b", {"x": -1.5, "y": True, "z": [1, "q"]})]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(1)] and [g(**k)]", "[f(1)] and [g(**k)]", []),
    ("pythonic", "[f(x=open('/etc/passwd'))]", "[f(x=open('/etc/passwd'))]", []),
    ("llama4_pythonic", '<|python_start|>[f(a="x)")]<|python_end|>', "", [("f", {"a": "x)"})]),
    ("llama4_pythonic", "[noop()]", "", [("noop", {})]),
    ("olmo3", '<function_calls>\nf(a="x")\nnoop()\n</function_calls>', "", [("f", {"a": "x"}), ("noop", {})]),
    ("openai", "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
     f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{A}<|call|>", "Look.",
     [("weather", W)]),
    ("openai", "<|start|>assistant to=functions.noop<|channel|>commentary json<|message|>{}<|call|>", "", [("noop", {})]),
    ("openai", "<|channel|>final<|message|>1 < 2<|return|>", "1 < 2", []),
]  # fmt: skip


class Plain:
    all_special_tokens = ()


def parser_of(name):
    return registry("tool_parsers").load(name)(Plain(), TOOLS)


def value(arguments):
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def whole(name, text):
    found = parser_of(name).extract_tool_calls(text, None)
    assert found.tools_called == bool(found.tool_calls)
    return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]


def streamed(name, pieces):
    parser, text, deltas = parser_of(name), "", []
    for piece in pieces:
        deltas.append(parser.extract_tool_calls_streaming(text, text + piece, piece, [], [], [], None))
        text += piece
    deltas.append(parser.finish_streaming())
    content, calls = "", []
    for delta in filter(None, deltas):
        content += delta.content or ""
        for call in delta.tool_calls:
            if call.function.name is not None:
                assert call.index == len(calls)
                calls.append((call.function.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + (call.function.arguments or ""))
    assert [call["name"] for call in parser.prev_tool_call_arr] == [name for name, _ in calls]
    return content, calls


def test_every_parser_has_a_golden_text():
    assert {name for name, *_ in GOLDEN} == set(BUILTINS["tool_parsers"])


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_golden(name, text, content, calls):
    at_once = whole(name, text)
    assert (at_once[0], [(called, value(arguments)) for called, arguments in at_once[1]]) == (content, calls)
    assert streamed(name, list(text)) == at_once
    for place in range(len(text) + 1):
        assert streamed(name, [text[:place], text[place:]]) == at_once, place


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    backend = tokenizers.Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    return Tokenizer(TokenizerParts(backend, "tiny"))


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, *_ in GOLDEN])
def test_golden_texts_as_tokens(tokenizer, name, text):
    reader = detokenizer_for(tokenizer, [], skip_special_tokens=False)
    pieces = [reader.push(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
    pieces.append(reader.finish())
    assert "".join(pieces).strip() == text.strip()
    assert streamed(name, pieces) == whole(name, "".join(pieces))


MARKS = sorted({
    mark
    for name in BUILTINS["tool_parsers"]
    for form in [getattr(registry("tool_parsers").load(name), "format", None)] if form
    for mark in form.written
})  # fmt: skip
WORDS = [*MARKS, J, N, P, A, "{", "}", "[", "]", ",", '"', "\\", "name", '"name": "f", ', '"arguments": {', "f(a=1)", ")",
         "(", "\n", " ", ":", "```", "json", "x", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
         "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "1", "null", "'", "<"]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(BUILTINS["tool_parsers"])))
def test_any_text_cut_anywhere_is_the_same(data, name):
    own = list(getattr(registry("tool_parsers").load(name), "format", CallFormat(JsonCalls())).written) or MARKS
    words = data.draw(st.lists(st.one_of(st.sampled_from(own), st.sampled_from(WORDS)), max_size=12))
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(name, pieces) == whole(name, text)


@settings(max_examples=100, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12,
), st.booleans(), st.integers(1, 7))  # fmt: skip
def test_json_is_read_in_pieces(thing, as_ascii, size):
    text = json.dumps([thing], ensure_ascii=as_ascii)
    reader = JsonReader()
    for at in range(0, len(text), size):
        assert reader.feed(text[at : at + size]) == len(text[at : at + size])
    assert reader.done
    assert json.loads(reader.text) == [thing]


@pytest.mark.parametrize(
    "text", ["{,}", "[1,]", '{"a" 1}', "[tru]", "[01]", "[1 2]", '["\\u12x"]', "}", "[+1]", "{1: 2}"]
)
def test_what_is_no_json_is_bad(text):
    reader = JsonReader()
    reader.feed(text)
    reader.end()
    assert reader.bad


def test_depth_has_a_bound():
    reader = JsonReader()
    reader.feed("[" * 100_000)
    assert reader.bad
    deep = "[f(a=" + "[" * 5000 + "]" * 5000 + ")]"
    assert whole("pythonic", deep) == (deep, [])


def test_kimi_keeps_the_models_ids_and_mistral_has_short_ones():
    found = parser_of("kimi_k2").extract_tool_calls(
        "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>", None
    )
    assert found.tool_calls[0].id == "functions.f:3"
    found = parser_of("mistral").extract_tool_calls(f"[TOOL_CALLS][{N}, {N}]", None)
    assert [len(call.id) for call in found.tool_calls] == [9, 9]
    assert new_mistral_id().isalnum()


@pytest.mark.parametrize(
    ("text", "schema", "guess", "found"),
    [
        ("5", {"type": "string"}, True, "5"),
        ("5", {"type": "integer"}, False, 5),
        ("five", {"type": "integer"}, False, "five"),
        ("true", {"type": "boolean"}, False, True),
        ("True", {"type": ["boolean", "null"]}, False, True),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, False, None),
        ("null", {"type": "string"}, False, "null"),
        ("{'a': [1]}", {"type": "object"}, False, {"a": [1]}),
        ("NaN", {"type": "number"}, False, "NaN"),
        ("5", None, True, 5),
        ("5", None, False, "5"),
        ("a", {"enum": ["a", "b"]}, True, "a"),
        ("[1]", {"properties": 3, "type": 4}, True, [1]),
    ],
)
def test_parameters_get_the_type_of_their_schema(text, schema, guess, found):
    assert typed(text, schema, guess) == found


@pytest.mark.parametrize(
    "text", ["f", "f(1)", "f(**a)", "f(a=b)", "f(a=1)(b=2)", "f(a={1: 2})", "import os", "f(a=b'x')", "\0"]
)
def test_python_that_is_no_call_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        read_call(text)


def test_a_format_of_ones_own_is_a_declaration():
    class Mine(FormatToolParser):
        format = CallFormat(JsonCalls(ends=("</c>",)), marks=("<c>",), ends=("</c>",))

    found = Mine(Plain()).extract_tool_calls(f"a<c>{N}</c>", None)
    assert (found.content, found.tool_calls[0].function.name) == ("a", "noop")
