"""The server, its bodies, parsers, tokenizers and media."""

from __future__ import annotations

from hardpoint.compat.parser_modules import REASONING_PARSER_MODULES, TOOL_PARSER_MODULES
from hardpoint.compat.rows import CONFIG, CONTRACTS, FRONT_END, MEDIA_STEPS, TYPES, Entry, Waits, names_from

_PROTOCOL = f"{TYPES}.answers " + " ".join(
    f"{FRONT_END}.server.protocol.{part}" for part in ("base", "chat", "completions", "models", "tokenize")
)
_APP = names_from(f"{FRONT_END}.server.app", "build_app init_app_state")
_PARSERS = f"{FRONT_END}.parsers"
_TOOL_PARSERS = names_from("hardpoint.extensions.parser_managers", "ToolParserManager") | names_from(
    f"{CONTRACTS}.tool_parser", "ToolParser"
)
_REASONING_PARSERS = names_from("hardpoint.extensions.parser_managers", "ReasoningParserManager") | names_from(
    f"{CONTRACTS}.reasoning_parser", "ReasoningParser"
)
_TOOL_TEXTS = names_from(f"{_PARSERS}.tool_facts", "find_tool_name find_tool_properties partial_tag_overlap")


def _parser_paths() -> dict[str, Entry | Waits]:
    """The parsers' modules, which have moved more than once."""
    rows: dict[str, Entry | Waits] = {
        "vllm.reasoning": Entry(f"{_PARSERS}.reasoning_formats", names=_REASONING_PARSERS),
        "vllm.reasoning.abs_reasoning_parsers": Entry(names=_REASONING_PARSERS),
        "vllm.reasoning.basic_parsers": Entry(
            names=names_from(f"{_PARSERS}.reasoning_formats", "BaseThinkingReasoningParser")
        ),
        "vllm.parser": Entry(),
        "vllm.parser.engine": Entry(),
        "vllm.parser.engine.adapters": Entry("hardpoint.compat.parser_engines"),
        "vllm.parser.qwen3": Entry(names=names_from("hardpoint.compat.parser_engines", "Qwen3Parser")),
        "vllm.entrypoints.generate.base": Entry(),
        "vllm.entrypoints.generate": Entry(),
        "vllm.entrypoints.generate.base.protocol": Entry(_PROTOCOL),
    }
    for name in REASONING_PARSER_MODULES:
        rows[f"vllm.reasoning.{name}"] = Entry(f"{_PARSERS}.reasoning_formats", names=_REASONING_PARSERS)
    for folder in ("vllm.tool_parsers", "vllm.entrypoints.openai.tool_parsers"):
        rows[folder] = Entry(f"{_PARSERS}.tool_formats", names=_TOOL_PARSERS)
        rows[f"{folder}.abstract_tool_parser"] = Entry(f"{CONTRACTS}.tool_parser", names=_TOOL_PARSERS)
        rows[f"{folder}.utils"] = Entry(names=_TOOL_TEXTS)
        for name in TOOL_PARSER_MODULES:
            rows[f"{folder}.{name}"] = Entry(f"{_PARSERS}.tool_formats", names=_TOOL_PARSERS)
    return rows


MODULES: dict[str, Entry | Waits] = {
    "vllm.entrypoints": Entry(),
    "vllm.entrypoints.llm": Entry(names=names_from("hardpoint.llm", "LLM")),
    "vllm.entrypoints.chat_utils": Entry("hardpoint.compat.adapters"),
    "vllm.entrypoints.openai": Entry(),
    "vllm.entrypoints.openai.api_server": Entry(names=_APP),
    "vllm.entrypoints.launchers": Entry(),
    "vllm.entrypoints.launchers.app": Entry(names=_APP),
    "vllm.entrypoints.openai.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.engine": Entry(),
    "vllm.entrypoints.openai.engine.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.chat_completion": Entry(),
    "vllm.entrypoints.openai.chat_completion.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.chat_completion.serving": Entry(
        names={"OpenAIServingChat": f"{FRONT_END}.server.serving.chat:ChatService"}
    ),
    "vllm.entrypoints.openai.completion": Entry(),
    "vllm.entrypoints.openai.completion.protocol": Entry(_PROTOCOL),
    "vllm.entrypoints.openai.responses": Entry(),
    "vllm.entrypoints.openai.responses.protocol": Entry(
        names=names_from(f"{FRONT_END}.server.protocol.responses", "ResponsesRequest")
    ),
    "vllm.entrypoints.pooling": Entry(),
    **{
        f"vllm.entrypoints.pooling.{module}": Entry(place)
        for folder in ("base", "pooling", "embed", "classify", "score", "scoring")
        for module, place in ((folder, ""), (f"{folder}.protocol", f"{FRONT_END}.server.protocol.pooling"))
    },
    "vllm.entrypoints.serve": Entry(),
    "vllm.entrypoints.serve.engine": Entry(),
    "vllm.entrypoints.serve.engine.protocol": Entry(_PROTOCOL),
    "vllm.tokenizers": Entry(f"{FRONT_END}.tokenizers"),
    "vllm.tokenizers.detokenizer_utils": Entry("hardpoint.compat.adapters"),
    "vllm.transformers_utils": Entry(),
    "vllm.transformers_utils.tokenizer": Entry(
        "hardpoint.compat.adapters", names={"AnyTokenizer": f"{FRONT_END}.tokenizers:TokenizerLike"}
    ),
    "vllm.transformers_utils.tokenizer_base": Entry(names={"TokenizerBase": f"{FRONT_END}.tokenizers:TokenizerLike"}),
    "vllm.transformers_utils.detokenizer_utils": Entry("hardpoint.compat.adapters"),
    "vllm.transformers_utils.config_parser_base": Waits("Hugging Face configuration parsers"),
    "vllm.transformers_utils.config": Entry(
        names={"_CONFIG_REGISTRY": f"{CONFIG}.model_hooks:CONFIG_REGISTRY"},
        waits=dict.fromkeys(("register_config_parser", "get_config"), "Hugging Face configuration parsers"),
    ),
    "vllm.renderers": Entry(names={"BaseRenderer": f"{FRONT_END}.inputs:InputProcessor"}),
    "vllm.multimodal": Entry(
        names=names_from(f"{CONTRACTS}.multimodal", "MULTIMODAL_REGISTRY MultiModalRegistry")
        | names_from(
            f"{TYPES}.multimodal", "MultiModalDataDict MultiModalKwargsItem MultiModalKwargsItems MultiModalUUIDDict"
        )
    ),
    "vllm.multimodal.registry": Entry(f"{CONTRACTS}.multimodal"),
    "vllm.multimodal.inputs": Entry(f"{TYPES}.multimodal"),
    "vllm.multimodal.parse": Entry(
        names=names_from(
            f"{CONTRACTS}.multimodal",
            "ImageProcessorItems ImageSize ModalityDataItems MultiModalDataItems MultiModalDataParser",
        )
    ),
    "vllm.multimodal.processing": Entry(f"{CONTRACTS}.multimodal {CONTRACTS}.prompt_updates"),
    "vllm.multimodal.processing.processor": Entry(
        f"{CONTRACTS}.multimodal {CONTRACTS}.prompt_updates",
        waits=dict.fromkeys(
            ("HFMultiModalInputs", "MultiModalProcessingResult", "MultiModalPromptUpdates", "PlaceholderFeaturesInfo"),
            MEDIA_STEPS,
        ),
    ),
    "vllm.multimodal.processing.context": Entry(f"{CONTRACTS}.multimodal"),
    "vllm.multimodal.processing.dummy_inputs": Entry(f"{CONTRACTS}.multimodal"),
    "vllm.multimodal.profiling": Entry(
        names=names_from(f"{CONTRACTS}.multimodal", "BaseDummyInputsBuilder ProcessorInputs")
    ),
    **_parser_paths(),
}
