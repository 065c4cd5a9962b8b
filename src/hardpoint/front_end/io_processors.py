"""The IO processor of a pooling model: which one, and a request's way through it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, to_json

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.errors import EngineGenerateError, HardpointError, PluginError
from hardpoint.extensions.boot import load_io_processor_class
from hardpoint.extensions.faults import in_words, note_fault
from hardpoint.extensions.ledger import Origin, attributing, ledger
from hardpoint.types.pooling_params import PoolingParams

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


def requested(vllm_config: VllmConfig, plugin_from_init: str | None = None) -> str:
    """The name that the caller, the user or the model's config gives, in this order; empty for none."""
    model = vllm_config.model_config
    facts = model.hf_config
    stated = facts.to_dict().get("io_processor_plugin") if hasattr(facts, "to_dict") else None
    return str(plugin_from_init or model.io_processor_plugin or stated or "")


def has_io_processor(vllm_config: VllmConfig, plugin_from_init: str | None = None) -> bool:
    """Whether an IO processor is asked for."""
    return bool(requested(vllm_config, plugin_from_init))


def get_io_processor(
    vllm_config: VllmConfig, renderer: Any = None, plugin_from_init: str | None = None
) -> IOProcessor[Any, Any] | None:
    """Build the IO processor that is asked for; None, with no plugin loaded, when none is.

    Raises a PluginError that is a ValueError when no plugin provides it, PluginError when it cannot be built.
    """
    name = requested(vllm_config, plugin_from_init)
    if not name:
        return None
    kind = load_io_processor_class(name)
    with attributing(ledger.origin_of_module(kind.__module__) or Origin(module=kind.__module__)):
        try:
            return kind(vllm_config, renderer)
        except Exception as error:
            raise PluginError(
                f"the IO processor {name!r} ({kind.__qualname__}) cannot be built: {in_words(error)}",
                code="plugin-call",
                origin=kind.__module__,
                fix="mend it, or leave --io-processor-plugin out",
            ) from error


def prompts_of(processor: IOProcessor[Any, Any], data: Any, request_id: str | None) -> list[Any]:
    """The prompts that a request's data make. Raises what the processor raises."""
    made = processor.pre_process(prompt=processor.parse_data(data), request_id=request_id)
    return as_prompts(made)


def as_prompts(made: Any) -> list[Any]:
    """A prompt or a sequence of prompts as a list; a list of token ids is one prompt."""
    if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Sequence):
        return [made]
    return [list(made)] if made and all(isinstance(item, int) for item in made) else list(made)


def params_of(processor: IOProcessor[Any, Any], params: PoolingParams | None) -> PoolingParams:
    """The parameters to run with; their task is `plugin` unless the processor chose one."""
    return processor.merge_pooling_params(params)


class BesideTheLoop:
    """A processor called off the event loop; what leads to one request's prompts runs in one call, and one context."""

    def __init__(self, processor: IOProcessor[Any, Any]) -> None:
        self._processor = processor

    async def before(self, data: Any, request_id: str) -> tuple[list[Any], PoolingParams]:
        """Prompts and parameters of a request."""
        return await asyncio.to_thread(self._before, data, request_id)

    def _before(self, data: Any, request_id: str) -> tuple[list[Any], PoolingParams]:
        with _blaming(self._processor):
            prompts = prompts_of(self._processor, data, request_id)
            return prompts, params_of(self._processor, None)

    async def after(self, outputs: Sequence[Any], request_id: str) -> Any:
        """The answer of a request."""
        return await asyncio.to_thread(self._after, outputs, request_id)

    def _after(self, outputs: Sequence[Any], request_id: str) -> Any:
        with _blaming(self._processor):
            answer = self._processor.post_process(outputs, request_id=request_id)
            try:
                to_json(answer)
            except PydanticSerializationError as error:
                raise TypeError(f"post_process gave what JSON cannot say: {error}") from None
            return answer


@contextmanager
def _blaming(processor: IOProcessor[Any, Any]) -> Iterator[None]:
    """What the block raises is a refusal of the request (ValueError), or the processor's fault, which ends it."""
    try:
        yield
    except (ValueError, HardpointError):
        raise
    except Exception as error:
        kind = type(processor)
        origin = ledger.origin_of_module(kind.__module__)
        what = f"the IO processor {kind.__qualname__} failed: {type(error).__name__}: {error}"
        note_fault("io_processors", kind.__qualname__, what, origin)
        raise EngineGenerateError(what, code="io-processor", origin=origin.label if origin else "") from error
