"""How each family of models marks its reasoning, from its public description; the classes carry vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hardpoint.front_end.parsers.harmony import GptOssReasoningParser as GptOssReasoningParser
from hardpoint.front_end.parsers.thinking import ThinkFormat, ThinkingParser

_NO_REASONING = ThinkFormat(keeps=True)


class BaseThinkingReasoningParser(ThinkingParser):
    """`<think>...</think>` in front of the answer."""

    format = ThinkFormat()


class DeepSeekR1ReasoningParser(ThinkingParser):
    """DeepSeek R1 and its distillations: reasoning up to `</think>`, its start mark is in the prompt or left out."""

    format = ThinkFormat(implicit=True)


class Qwen3ReasoningParser(ThinkingParser):
    """Qwen 3: `<think>...</think>`; the prompt may have begun it, or have ended it with `enable_thinking` false."""

    format = ThinkFormat(implicit=True)

    def choose_format(self, template_kwargs: dict[str, Any]) -> ThinkFormat:
        """Without thinking, only what is marked is reasoning."""
        return replace(self.format, implicit=template_kwargs.get("enable_thinking", True) is not False)

    def _starts_itself(self) -> bool:
        return True


class Glm4MoeModelReasoningParser(Qwen3ReasoningParser):
    """GLM 4.5 and later: `<think>...</think>`."""


class Holo2ReasoningParser(Qwen3ReasoningParser):
    """Holo 2: reasoning up to `</think>`, unless the template argument `thinking` is false."""

    def choose_format(self, template_kwargs: dict[str, Any]) -> ThinkFormat:
        """Without thinking, only what is marked is reasoning."""
        return replace(self.format, implicit=template_kwargs.get("thinking", True) is not False)

    def _starts_itself(self) -> bool:
        return False


class DeepSeekV3ReasoningParser(ThinkingParser):
    """DeepSeek V3.1 and later: as R1 with the template argument `thinking` (or `enable_thinking`), else none."""

    format = ThinkFormat(implicit=True)

    def choose_format(self, template_kwargs: dict[str, Any]) -> ThinkFormat:
        """These models reason only when asked to."""
        thinks = bool(template_kwargs.get("thinking") or template_kwargs.get("enable_thinking"))
        return replace(self.format, implicit=thinks)


class KimiK2ReasoningParser(ThinkingParser):
    """Kimi K2 Thinking: `<think>...</think>`; a call ends the reasoning too."""

    format = ThinkFormat(implicit=True, breaks=("<|tool_calls_section_begin|>",))

    def choose_format(self, template_kwargs: dict[str, Any]) -> ThinkFormat:
        """The template argument `thinking` switches it off."""
        return replace(self.format, implicit=template_kwargs.get("thinking", True) is not False)


class GraniteReasoningParser(ThinkingParser):
    """Granite 3.2: headings in words."""

    format = ThinkFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    )


class MistralReasoningParser(ThinkingParser):
    """Magistral: `[THINK]...[/THINK]`."""

    format = ThinkFormat(starts=("[THINK]",), ends=("[/THINK]",))


class HunyuanA13BReasoningParser(ThinkingParser):
    """Hunyuan A13B: `<think>...</think>` and then `<answer>...</answer>`."""

    format = ThinkFormat(dropped=("<answer>\n", "\n</answer>", "<answer>", "</answer>"))


class Step3ReasoningParser(DeepSeekR1ReasoningParser):
    """Step 3: reasoning up to `</think>`."""


class Step3p5ReasoningParser(DeepSeekR1ReasoningParser):
    """Step 3.5: reasoning up to `</think>`."""


class MiniMaxM2ReasoningParser(DeepSeekR1ReasoningParser):
    """MiniMax M2: reasoning up to `</think>`."""


class MiniMaxM2AppendThinkReasoningParser(ThinkingParser):
    """MiniMax M2 with its reasoning as part of the content."""

    format = _NO_REASONING


class Ernie45ReasoningParser(ThinkingParser):
    """ERNIE 4.5: reasoning up to `</think>`, then the answer in `<response>` tags."""

    format = ThinkFormat(implicit=True, dropped=("<response>\n", "\n</response>", "<response>", "</response>"))


class SeedOSSReasoningParser(ThinkingParser):
    """Seed OSS: `<seed:think>...</seed:think>`."""

    format = ThinkFormat(starts=("<seed:think>",), ends=("</seed:think>",), implicit=True)


class Olmo3ReasoningParser(DeepSeekR1ReasoningParser):
    """OLMo 3: reasoning up to `</think>`; its marks are words of several tokens."""


class NemotronV3ReasoningParser(Qwen3ReasoningParser):
    """Nemotron 3: `<think>...</think>`."""


class IdentityReasoningParser(ThinkingParser):
    """No reasoning: everything is content."""

    format = _NO_REASONING

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """There is none to wait for."""
        return True
