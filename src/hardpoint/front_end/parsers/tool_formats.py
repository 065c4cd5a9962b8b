"""How each family of models writes tool calls, from its public description; the classes carry vLLM's names."""

# ruff: noqa: RUF001, RUF002 - the bars of these models are wide

from __future__ import annotations

from hardpoint.front_end.parsers.calls import CallFormat, CallFrame
from hardpoint.front_end.parsers.format_parser import FormatToolParser
from hardpoint.front_end.parsers.harmony import HarmonyToolParser
from hardpoint.front_end.parsers.json_calls import JsonCalls, NamedCalls
from hardpoint.front_end.parsers.mistral_calls import MistralBody
from hardpoint.front_end.parsers.pythonic_calls import PythonicCalls
from hardpoint.front_end.parsers.xml_calls import KeyedCalls, TaggedCalls

_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _framed(mark: str, end: str) -> CallFrame:
    """An object with the name and then the arguments, on a line of its own between two marks."""
    return CallFrame(f'{mark}\n{{"name": {{name}}, "arguments": ', f"}}\n{end}")


class Hermes2ProToolParser(FormatToolParser):
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, one per call."""

    format = CallFormat(
        JsonCalls(ends=(_TOOL_CALL_END,)),
        marks=(_TOOL_CALL,),
        ends=(_TOOL_CALL_END,),
        frame=_framed(_TOOL_CALL, _TOOL_CALL_END),
    )


class Ernie45ToolParser(FormatToolParser):
    """ERNIE 4.5: as Hermes; the answer itself may stand in `<response>` tags."""

    format = CallFormat(
        JsonCalls(ends=(_TOOL_CALL_END,)),
        marks=(_TOOL_CALL,),
        ends=(_TOOL_CALL_END,),
        dropped=("<response>\n", "\n</response>\n", "</response>"),
        frame=_framed(_TOOL_CALL, _TOOL_CALL_END),
    )


class LongcatFlashToolParser(FormatToolParser):
    """LongCat: as Hermes, in `<longcat_tool_call>` tags."""

    format = CallFormat(
        JsonCalls(ends=("</longcat_tool_call>",)),
        marks=("<longcat_tool_call>",),
        ends=("</longcat_tool_call>",),
        frame=_framed("<longcat_tool_call>", "</longcat_tool_call>"),
    )


class Llama3JsonToolParser(FormatToolParser):
    """Llama 3 and 4: the answer is `{"name": "f", "parameters": {...}}`, several joined by `;`."""

    format = CallFormat(JsonCalls(bare=True), marks=("<|python_tag|>",), at_start=("{",))


class MistralToolParser(FormatToolParser):
    """Mistral: `[TOOL_CALLS]` and a list of objects, or, since version 11, `[TOOL_CALLS]f{...}` per call."""

    format = CallFormat(MistralBody, marks=("[TOOL_CALLS]",))


class GraniteToolParser(FormatToolParser):
    """Granite 3: `<|tool_call|>` (3.0) or `<tool_call>` and a list of objects."""

    format = CallFormat(JsonCalls(), marks=("<|tool_call|>", _TOOL_CALL), ends=(_TOOL_CALL_END,))


class Granite20bFCToolParser(FormatToolParser):
    """Granite 20B function calling: `<function_call> {...}` per call."""

    format = CallFormat(
        JsonCalls(),
        marks=("<function_call>",),
        frame=CallFrame('<function_call> {"name": {name}, "arguments": ', "}"),
    )


class Internlm2ToolParser(FormatToolParser):
    """InternLM 2: `<|action_start|><|plugin|>{"name": "f", "parameters": {...}}<|action_end|>`."""

    format = CallFormat(
        JsonCalls(ends=("<|action_end|>",)),
        marks=("<|action_start|><|plugin|>",),
        ends=("<|action_end|>",),
        frame=CallFrame('<|action_start|><|plugin|>\n{"name": {name}, "parameters": ', "}<|action_end|>"),
    )


class JambaToolParser(FormatToolParser):
    """Jamba: a list of objects in `<tool_calls>` tags."""

    format = CallFormat(JsonCalls(ends=("</tool_calls>",)), marks=("<tool_calls>",), ends=("</tool_calls>",))


class HunyuanA13BToolParser(JambaToolParser):
    """Hunyuan A13B: a list of objects in `<tool_calls>` tags."""


class MinimaxToolParser(JambaToolParser):
    """MiniMax M1: an object per line in `<tool_calls>` tags."""


class Phi4MiniJsonToolParser(FormatToolParser):
    """Phi-4 mini: `functools[{...}, ...]`."""

    format = CallFormat(JsonCalls(), marks=("functools",))


class xLAMToolParser(FormatToolParser):
    """xLAM: a list of objects, as the whole answer, in a Markdown fence, or in tags."""

    format = CallFormat(
        JsonCalls(ends=(_TOOL_CALL_END,), bare=True, fenced=True),
        marks=("[TOOL_CALLS]", _TOOL_CALL, "```json\n"),
        at_start=("[", "{"),
        ends=(_TOOL_CALL_END, "```"),
    )


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


class DeepSeekV3ToolParser(FormatToolParser):
    """DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, then arguments in a JSON fence."""

    format = CallFormat(
        NamedCalls(prefix="function<｜tool▁sep｜>", name_end=("\n", "{"), end=_DEEPSEEK_END, fenced=True),
        marks=(_DEEPSEEK_BEGIN,),
        ends=(_DEEPSEEK_END,),
        dropped=_DEEPSEEK_AROUND,
    )


class DeepSeekV31ToolParser(FormatToolParser):
    """DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    format = CallFormat(
        NamedCalls(name_end=("<｜tool▁sep｜>",), end=_DEEPSEEK_END),
        marks=(_DEEPSEEK_BEGIN,),
        ends=(_DEEPSEEK_END,),
        dropped=_DEEPSEEK_AROUND,
    )


class DeepSeekV32ToolParser(FormatToolParser):
    """DeepSeek V3.2: `<｜DSML｜invoke name="f">` with a tag per parameter that says whether it is text."""

    format = CallFormat(
        TaggedCalls(
            call='<｜DSML｜invoke name="',
            call_tail='">',
            call_end="</｜DSML｜invoke>",
            parameter='<｜DSML｜parameter name="',
            parameter_name_end='"',
            parameter_tail=">",
            parameter_end="</｜DSML｜parameter>",
            part_end="</｜DSML｜function_calls>",
        ),
        marks=("<｜DSML｜function_calls>",),
        ends=("</｜DSML｜function_calls>",),
    )


class KimiK2ToolParser(FormatToolParser):
    """Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    format = CallFormat(
        NamedCalls(name_end=("<|tool_call_argument_begin|>",), end="<|tool_call_end|>", numbered=True),
        marks=("<|tool_call_begin|>",),
        ends=("<|tool_call_end|>",),
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    )


class Glm4MoeModelToolParser(FormatToolParser):
    """GLM 4.5 and later: a name, then `<arg_key>` and `<arg_value>` pairs, in `<tool_call>` tags."""

    format = CallFormat(KeyedCalls(end=_TOOL_CALL_END), marks=(_TOOL_CALL,), ends=(_TOOL_CALL_END,))


class Glm47MoeModelToolParser(Glm4MoeModelToolParser):
    """GLM 4.7: as 4.5, without line breaks."""


def _functions(mark: str, end: str) -> CallFormat:
    """`<function=f><parameter=a>1</parameter></function>` between two marks; the first is sometimes left out."""
    calls = TaggedCalls(
        call="<function=",
        call_tail=">",
        call_end="</function>",
        parameter="<parameter=",
        parameter_name_end=">",
        parameter_tail=">",
        parameter_end="</parameter>",
        part_end=end,
    )
    return CallFormat(calls, marks=(mark, calls.call), ends=(end,))


class Qwen3CoderToolParser(FormatToolParser):
    """Qwen3 Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`."""

    format = _functions(_TOOL_CALL, _TOOL_CALL_END)


class Qwen3XMLToolParser(Qwen3CoderToolParser):
    """Qwen3 Coder's format under its other name."""


class Step3p5ToolParser(Qwen3CoderToolParser):
    """Step 3.5: Qwen3 Coder's format."""


class SeedOssToolParser(FormatToolParser):
    """Seed OSS: Qwen3 Coder's format in `<seed:tool_call>` tags."""

    format = _functions("<seed:tool_call>", "</seed:tool_call>")


class MinimaxM2ToolParser(FormatToolParser):
    """MiniMax M2: `<invoke name="f"><parameter name="a">1</parameter></invoke>` in its own tags."""

    format = CallFormat(
        TaggedCalls(
            call="<invoke name=",
            call_tail=">",
            call_end="</invoke>",
            parameter="<parameter name=",
            parameter_name_end=">",
            parameter_tail=">",
            parameter_end="</parameter>",
            part_end="</minimax:tool_call>",
        ),
        marks=("<minimax:tool_call>",),
        ends=("</minimax:tool_call>",),
    )


class Step3ToolParser(FormatToolParser):
    """Step 3: `<steptml:invoke name="f">` and `<steptml:parameter name="a">` tags."""

    format = CallFormat(
        TaggedCalls(
            call='<steptml:invoke name="',
            call_tail='">',
            call_end="</steptml:invoke>",
            parameter='<steptml:parameter name="',
            parameter_name_end='"',
            parameter_tail=">",
            parameter_end="</steptml:parameter>",
            part_end="<｜tool_call_end｜>",
        ),
        marks=("<｜tool_call_begin｜>function<｜tool_sep｜>",),
        ends=("<｜tool_call_end｜>",),
        dropped=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    )


class PythonicToolParser(FormatToolParser):
    """Llama 3.2, ToolACE: the answer is `[f(a=1), g(b="x")]`."""

    format = CallFormat(PythonicCalls(), at_start=("[",))


class Llama4PythonicToolParser(FormatToolParser):
    """Llama 4: as pythonic, with or without `<|python_start|>` and `<|python_end|>` around it."""

    format = CallFormat(PythonicCalls(), marks=("<|python_start|>",), at_start=("[",), ends=("<|python_end|>",))


class Olmo3PythonicToolParser(FormatToolParser):
    """OLMo 3: a pythonic call per line in `<function_calls>` tags."""

    format = CallFormat(
        PythonicCalls(ends=("</function_calls>",), lines=True),
        marks=("<function_calls>",),
        ends=("</function_calls>",),
    )


class OpenAIToolParser(HarmonyToolParser):
    """gpt-oss: messages to `functions.f` in the commentary channel."""
