"""A file that changes a tool parser which is there already; `--tool-parser-plugin` has the server import it."""

from typing import Any

from hardpoint.extensions.parser_managers import ToolParserManager
from hardpoint.types.answers import DeltaFunctionCall, DeltaMessage, ExtractedToolCallInformation, FunctionCall

NAMESPACE = "functions."
Hermes = ToolParserManager.get_tool_parser("hermes")


def take_off_namespace(function: FunctionCall | DeltaFunctionCall | None) -> None:
    """Name the function as the request does; in a stream only a call's first fragment has a name."""
    if function is not None and function.name is not None:
        function.name = function.name.removeprefix(NAMESPACE)


@ToolParserManager.register_module("acme_file")
class AcmeToolParser(Hermes):
    """Hermes, for a model that calls the tool `weather` `functions.weather`."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls and the content of a whole answer."""
        found = super().extract_tool_calls(model_output, request)
        for call in found.tool_calls:
            take_off_namespace(call.function)
        return found

    def extract_tool_calls_streaming(self, *pieces: Any, **named: Any) -> DeltaMessage | None:
        """What the next piece of a stream adds; its arguments are passed on as they come."""
        return self._renamed(super().extract_tool_calls_streaming(*pieces, **named))

    def finish_streaming(self) -> DeltaMessage | None:
        """What was held back."""
        return self._renamed(super().finish_streaming())

    def _renamed(self, delta: DeltaMessage | None) -> DeltaMessage | None:
        for call in delta.tool_calls if delta else ():
            take_off_namespace(call.function)
        return delta
