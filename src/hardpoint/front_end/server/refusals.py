"""What a request may say and this server does not do: refused by name, or named here as without effect.

A field of a body is one of four things: it changes the answer or what the engine is asked; it is refused, here or
by the input processor, which knows the model; it is refused except for the values that mean what happens anyway; or it
stands under `without_effect`, which the documentation repeats. Fields that nobody's API documents are logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import BaseModel

from hardpoint.errors import VLLMValidationError


class Refusal(NamedTuple):
    """A field, the values that are harmless, and why the rest is refused.

    field  a path, with `*` for every element of a list: `tools.*.function.defer_loading`
    """

    field: str
    harmless: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True)
class FieldRules:
    """What becomes of the fields of one kind of body that have no effect, or not with every value.

    without_effect  field -> why nothing has to come of it; taken with any value
    """

    refused: tuple[Refusal, ...] = ()
    without_effect: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> frozenset[str]:
        """First parts of all names: unknown fields are logged, these are not."""
        return frozenset(name.partition(".")[0] for name in (*self.without_effect, *(one[0] for one in self.refused)))

    def inside(self, path: str) -> FieldRules:
        """The rules of the objects at a path."""
        inner = f"{path}."
        return FieldRules(
            tuple(
                one._replace(field=one.field.removeprefix(inner)) for one in self.refused if one[0].startswith(inner)
            ),
            {name.removeprefix(inner): why for name, why in self.without_effect.items() if name.startswith(inner)},
        )


def _unset(value: Any) -> bool:
    return not value


def _none(value: Any) -> bool:
    return value is None


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == known and type(value) is type(known) for known in values)


_NO_MEDIA = "pooling takes text only"
_RENDER_ONLY = "it belongs to the render routes, which this server does not have"
_ONE_TIER = "there is one tier of service"
_NOT_PADDED = "the events of streams are not padded"
_NO_PAIR_TEMPLATE = "there are no templates for pairs of texts"
_DIRECT = "tools are called by the model alone"
_KEPT_IN_MEMORY = "prompts are kept in memory as long as there is room"
_NO_SEARCH = "all tools are shown to the model from the beginning"
_PREFIXES = "prompts with equal beginnings share their cache by themselves"
_NO_ACCOUNTS = "nothing is told apart or counted by account here"

# fmt: off
_SHARED = (
    Refusal("use_beam_search", _unset, "beam search is not available"),
    Refusal("length_penalty", lambda v: v == 1.0, "it only concerns beam search, which is not available"),
    Refusal("return_token_offsets", _unset, _RENDER_ONLY),
    Refusal("mm_payload", lambda v: v == "tensors", _RENDER_ONLY),
    Refusal("return_mm_kwargs", _unset, _RENDER_ONLY),
    Refusal("stream_options.include_obfuscation", _unset, _NOT_PADDED),
    Refusal("service_tier", _one_of("auto", "default"), _ONE_TIER),
)
_OPENAI = (
    Refusal("moderation", _unset, "answers are not moderated"),
    Refusal("prompt_cache_options", _unset, _KEPT_IN_MEMORY),
    Refusal("prompt_cache_retention", _one_of("in_memory", "in-memory"), _KEPT_IN_MEMORY),
)
_USERS = {"user": _NO_ACCOUNTS, "safety_identifier": _NO_ACCOUNTS, "prompt_cache_key": _PREFIXES}
_DETAIL = "images are read at the size the model's processor takes"

COMPLETIONS = FieldRules(
    (
        *_SHARED,
        Refusal("prompt_embeds", _none, "prompt embeddings are not available"),
        Refusal("suffix", _unset, "the model has no fill-in-the-middle template"),
        Refusal("best_of", _one_of(1), "all n texts are returned"),
    ),
    {"user": _NO_ACCOUNTS},
)
CHAT = FieldRules(
    (
        *_SHARED,
        *_OPENAI,
        Refusal("store", _unset, "chat completions are not kept"),
        Refusal("verbosity", _one_of("medium"), "models have no such setting"),
        Refusal("modalities", lambda v: v in (None, ["text"]), "answers are text"),
        Refusal("audio", _unset, "answers are text"),
        Refusal("functions", _unset, "use tools"),
        Refusal("function_call", _one_of("none"), "use tool_choice"),
        Refusal("web_search_options", _none, "there is no web search"),
        Refusal("prediction", _unset, "predicted outputs are not available"),
        Refusal("best_of", _one_of(1), "all n answers are returned"),
        Refusal("tools.*.function.defer_loading", _unset, _NO_SEARCH),
        Refusal("messages.*.content.*.image_url.detail", _one_of("auto", "high", "original"), _DETAIL),
    ),
    _USERS | {"metadata": "it describes completions that are kept, and none is"},
)
RESPONSES = FieldRules(
    (
        *_OPENAI,
        Refusal("service_tier", _one_of("auto", "default"), _ONE_TIER),
        Refusal("stream_options.include_obfuscation", _unset, _NOT_PADDED),
        Refusal("prompt", _none, "prompts are not kept"),
        Refusal("conversation", _none, "conversations are not kept: use previous_response_id"),
        Refusal("max_tool_calls", _none, "it concerns tools that the server runs, and there are none"),
        Refusal("truncation", _one_of("disabled"), "an input that is too long is refused, not cut"),
        Refusal("top_logprobs", _unset, "log-probabilities are given by /v1/chat/completions"),
        Refusal("include.*", _one_of("reasoning.encrypted_content"), "it is no part of the output"),
        Refusal("reasoning.summary", _one_of("auto"), "reasoning is given whole"),
        Refusal("reasoning.generate_summary", _one_of("auto"), "reasoning is given whole"),
        Refusal("reasoning.context", _one_of("auto"), "the model sees the reasoning items of the input"),
        Refusal("reasoning.mode", _one_of("standard"), "models have no such setting"),
        Refusal("text.verbosity", _one_of("medium"), "models have no such setting"),
        Refusal("context_management", _unset, "conversations are not shortened"),
        Refusal("access_programs", _unset, _NO_ACCOUNTS),
        Refusal("background_options", _unset, "responses in the background have no settings"),
        Refusal("image", _unset, "answers are text"),
        Refusal("tools.*.defer_loading", _unset, _NO_SEARCH),
        Refusal("tools.*.allowed_callers", _one_of(["direct"]), _DIRECT),
        Refusal("tools.*.async", _unset, "the model waits for every result"),
        Refusal("tools.*.output_schema", _unset, "models are not told the form of results"),
        Refusal("input.*.content.*.detail", _one_of("auto", "high", "original"), _DETAIL),
    ),
    {
        "include.reasoning.encrypted_content": "reasoning items have their text in the open, and are taken back so",
        "prompt_cache_key": _PREFIXES,
        "safety_identifier": _NO_ACCOUNTS,
    },
)
_TOKENS = (
    Refusal("speed", _one_of("standard"), "there is one speed"),
    Refusal("user_profile_id", _none, _NO_ACCOUNTS),
    Refusal("workspace_id", _none, _NO_ACCOUNTS),
    Refusal("thinking.display", _none, "thinking is given whole"),
    Refusal("thinking.budget_tokens", _none, "thinking is bounded by max_tokens alone: use the type adaptive"),
    Refusal("output_config.task_budget", _none, "there are no budgets but max_tokens"),
    Refusal("context_management", _unset, "conversations are not shortened"),
    Refusal("mcp_servers", _unset, "the server calls no other servers"),
    Refusal("output_format", _none, "use output_config.format"),
    Refusal("tools.*.defer_loading", _unset, _NO_SEARCH),
    Refusal("tools.*.allowed_callers", _one_of(["direct"]), _DIRECT),
    Refusal("tools.*.input_examples", _unset, "models are told a tool's description and schema"),
    Refusal("messages.*.content.*.transformations", _unset, _DETAIL),
    Refusal("messages.*.content.*.toolset_name", _none, "there are no sets of tools"),
    Refusal("messages.*.content.*.caller", _one_of({"type": "direct"}), _DIRECT),
)
_CACHE_CONTROL = {
    "cache_control": _PREFIXES,
    "tools.*.cache_control": _PREFIXES,
    "tools.*.eager_input_streaming": "arguments are streamed as they are written",
    "system.*.cache_control": _PREFIXES,
    "messages.*.content.*.cache_control": _PREFIXES,
    "messages.*.content.*.citations": "what was cited in earlier answers is in their text",
    "messages.*.content.*.signature": "nobody signs thinking here",
}
COUNT_TOKENS = FieldRules(_TOKENS, _CACHE_CONTROL)
MESSAGES = FieldRules(
    (
        *_TOKENS,
        Refusal("service_tier", _one_of("auto", "standard_only"), _ONE_TIER),
        Refusal("container", _none, "there are no containers"),
        Refusal("inference_geo", _none, "there is one place"),
        Refusal("diagnostics", _unset, "there are none"),
        Refusal("billing_policy", _none, _NO_ACCOUNTS),
        Refusal("compaction", _unset, "conversations are not shortened"),
        Refusal("fallback_credit_token", _none, _NO_ACCOUNTS),
        Refusal("fallbacks", _unset, "there is one model"),
        Refusal("thread", _none, "conversations are not kept"),
    ),
    _CACHE_CONTROL | {"metadata": _NO_ACCOUNTS},
)
POOLING = FieldRules(
    (
        Refusal("mm_processor_kwargs", _unset, _NO_MEDIA),
        Refusal("padding", _one_of("do_not_pad"), "prompts are not padded here, and need not be"),
    ),
    {"user": _NO_ACCOUNTS},
)
POOLING_INPUT = FieldRules((*POOLING.refused, Refusal("media_io_kwargs", _unset, _NO_MEDIA)), POOLING.without_effect)
COMPARISON = FieldRules(
    (
        *POOLING.refused,
        Refusal("instruction", _unset, _NO_PAIR_TEMPLATE),
        Refusal("chat_template_kwargs", _unset, _NO_PAIR_TEMPLATE),
    ),
    POOLING.without_effect,
)
UNLOAD_ADAPTER = FieldRules(without_effect={"lora_int_id": "adapters are known by their names"})
# fmt: on


def refuse_unsupported(request: Any) -> None:
    """Raise VLLMValidationError for the first field that asks for what we do not have, by the rules of the body."""
    for path, harmless, reason in type(request).rules.refused:
        for place, value in values_at(request, path):
            if not harmless(value):
                raise VLLMValidationError(f"{place} is not supported by this server: {reason}", parameter=place)


def values_at(body: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What stands at a path of a body, each with its place; nothing where the path leads nowhere."""
    found: list[tuple[str, Any]] = [("", body)]
    for name in path.split("."):
        further: list[tuple[str, Any]] = []
        for place, value in found:
            if name == "*":
                listed = value if isinstance(value, list) else []
                further += [(f"{place}.{index}", one) for index, one in enumerate(listed)]
            elif isinstance(value, dict):
                further += [(f"{place}.{name}", value[name])] if name in value else []
            elif isinstance(value, BaseModel):
                own = name in type(value).model_fields or name in (value.__pydantic_extra__ or {})
                further += [(f"{place}.{name}", getattr(value, name))] if own else []
        found = further
    return ((place.removeprefix("."), value) for place, value in found)
