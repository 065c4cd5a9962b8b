"""A file that changes a reasoning parser which is there already; `--reasoning-parser-plugin` has it imported."""

from typing import Any

from hardpoint.extensions.parser_managers import ReasoningParserManager
from hardpoint.types.answers import DeltaMessage

DeepSeekR1 = ReasoningParserManager.get_reasoning_parser("deepseek_r1")


def without_reasoning(delta: DeltaMessage | None) -> DeltaMessage | None:
    """The content of a stream's message; None where it has none."""
    return DeltaMessage(content=delta.content) if delta and delta.content else None


@ReasoningParserManager.register_module("acme_file")
class AcmeReasoningParser(DeepSeekR1):
    """DeepSeek R1's, for a server that keeps the reasoning to itself."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """No reasoning, and the content of a whole answer."""
        _, content = super().extract_reasoning(model_output, request)
        return None, content

    def extract_reasoning_streaming(self, *pieces: Any, **named: Any) -> DeltaMessage | None:
        """What the next piece of a stream adds; its arguments are passed on as they come."""
        return without_reasoning(super().extract_reasoning_streaming(*pieces, **named))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return without_reasoning(super().finish_streaming())
