"""From what the user asked for to a configuration that every process can rely on: a list of named steps.

`settle` runs them when a `VllmConfig` is made, in the front end, and again in the engine core, as the
platform hooks of vLLM run twice. Every step may run on a configuration that is settled already and
then changes nothing.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardpoint.config import wire
from hardpoint.config.adapters import settle_adapters
from hardpoint.config.async_scheduling import choose_async_scheduling
from hardpoint.config.cache_dtype import choose_cache_dtype
from hardpoint.config.compilation_choice import choose_compilation
from hardpoint.config.draft import Draft, draft_of
from hardpoint.config.graph_choice import choose_graphs
from hardpoint.config.media import settle_media
from hardpoint.config.model_facts import (
    build_hf_config,
    choose_model_class,
    derived_max_model_len,
    read_facts,
    read_generation,
    text_part,
)
from hardpoint.config.model_files import has_revisions, hub_of, locate
from hardpoint.config.model_hooks import ask_model_hook
from hardpoint.config.pooling import longest_input, settle_pooling
from hardpoint.config.quantization_choice import choose_quantization
from hardpoint.config.sections import ModelConfig, ParallelConfig, VllmConfig, near_miss
from hardpoint.config.sections.model import SAMPLING_DEFAULTS
from hardpoint.config.unsupported import check_supported
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions.find_ref import why_not_found
from hardpoint.extensions.ledger import BUILT_IN, Origin, ledger
from hardpoint.extensions.parser_choice import choose_parser
from hardpoint.extensions.refs import load_ref, parse_ref, ref_from_qualname
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger

logger = init_logger(__name__)

_VERIFY = "hardpoint.worker.models.registry:verify_with_platform"
DTYPES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
_OTHER_LOAD_FORMATS = (
    "pt mistral npcache sharded_state tensorizer runai_streamer runai_streamer_sharded fastsafetensors instanttensor "
    "ipc_cache modelexpress bitsandbytes"
)
_GENERATION_KEYS = {*SAMPLING_DEFAULTS, "eos_token_id", "bos_token_id", "pad_token_id", "do_sample"}


@dataclass(frozen=True, slots=True)
class Step:
    """One named step.

    always  it runs without a model too
    hook    it calls a method of the platform that may write
    """

    name: str
    run: Callable[[VllmConfig, Any], None]
    always: bool = False
    hook: bool = False


def settle(config: VllmConfig) -> None:
    """Run all steps on a configuration, which `seal` must follow. Raises `ConfigError` or `ModelFileError`."""
    platform = load_ref("hardpoint.platforms:current_platform")
    draft = draft_of(config) or Draft(config)
    draft.sealed = False
    again, before = config.is_settled, len(draft.writes)
    for step in STEPS:
        if config.model_config is None and not step.always:
            continue
        with draft.attributing(step.name, _author(platform) if step.hook else None):
            step.run(config, platform)
    if again:
        _report_second_run(platform, draft.writes[before:])
    config.is_settled = True


def settle_again(config: VllmConfig) -> None:
    """Run all steps, and the platform's hooks with them, on a configuration from another process; seal it."""
    config.__post_init__()
    seal(config)


def seal(config: VllmConfig) -> None:
    """Declare a configuration finished."""
    draft = draft_of(config)
    if draft is not None:
        draft.seal()


def _author(platform: Any) -> Origin:
    return ledger.origin_of_module(type(platform).__module__) or BUILT_IN


def _report_second_run(platform: Any, writes: list[tuple[str, str]]) -> None:
    for path, step in writes:
        text = f"{type(platform).__name__} changed {path} again when the configuration was settled a second time"
        ledger.record("warn", "config", path, origin=_author(platform), detail=f"{text}, in step {step!r}")
        logger.warning("%s; a hook that runs twice must come to the same result", text)


# -- the model ---------------------------------------------------------------------------------------


def _read_model_files(config: VllmConfig, platform: Any) -> None:
    model, load = config.model_config, config.load_config
    if model.hf_config is not None:
        return
    _check_revision("--revision", model.revision, model.model)
    path = locate(model.model, hub_of(model, load))
    facts = read_facts(path)
    model.local_path = str(path.resolve())
    model.hf_config = build_hf_config(facts, model.hf_overrides, path)
    model.hf_text_config = text_part(model.hf_config)
    model.generation_defaults = _generation(model, facts.generation)
    if facts.kind == "gguf":
        _use_gguf(config)


def _check_revision(flag: str, revision: str | None, name: str) -> None:
    if revision is not None and not has_revisions(name):
        raise ConfigError(
            f"{flag} is {revision!r}, and {name!r} is no repository with revisions",
            code="config-value",
            origin=flag,
            fix="leave it out, or name a repository",
        )


def _generation(model: ModelConfig, found: dict[str, Any]) -> dict[str, Any]:
    _check_generation_overrides(model)
    if model.generation_config == "vllm":
        return {}
    if model.generation_config == "auto":
        return found
    folder = Path(model.generation_config).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"--generation-config is {model.generation_config!r}: it is neither auto, vllm nor a folder",
            code="config-value",
        )
    return read_generation(folder)


def _check_generation_overrides(model: ModelConfig) -> None:
    for key in model.override_generation_config:
        if key not in _GENERATION_KEYS:
            hint = near_miss(key, _GENERATION_KEYS)
            raise ConfigError(f"--override-generation-config has the unknown key {key!r}{hint}", code="config-value")


def _use_gguf(config: VllmConfig) -> None:
    model, load = config.model_config, config.load_config
    if model.quantization not in (None, "gguf"):
        raise ConfigError(
            f"model_config.quantization is {model.quantization!r}: a GGUF file brings its own, gguf",
            code="config-quantization",
        )
    model.quantization = "gguf"
    if load.load_format == "auto":
        load.load_format = "gguf"


def _find_tokenizer(config: VllmConfig, platform: Any) -> None:
    model = config.model_config
    if model.skip_tokenizer_init or model.tokenizer_path:
        return
    name, revision = model.tokenizer or model.model, model.tokenizer_revision
    # By default it is the model's.
    if revision != model.revision:
        _check_revision("--tokenizer-revision", revision, name)
    elif name == model.model:
        model.tokenizer_path = model.local_path
        return
    model.tokenizer_path = str(locate(name, hub_of(model, config.load_config, revision)).resolve())


def _choose_model_class(config: VllmConfig, platform: Any) -> None:
    model = config.model_config
    chosen = model.model_class
    if chosen is not None and chosen.architecture == model.architecture:
        # Another process has chosen; this one must know the class.
        model.registry.take_over(chosen)
    else:
        model.model_class = chosen = choose_model_class(model)
    if model.architectures[0] != chosen.architecture:
        others = (name for name in model.architectures if name != chosen.architecture)
        model.hf_config.architectures = [chosen.architecture, *others]
    load_ref(_VERIFY)(chosen.architecture)


def _choose_dtype(config: VllmConfig, platform: Any) -> None:
    model = config.model_config
    if model.dtype == "auto":
        stated = getattr(model.hf_text_config, "dtype", None) or getattr(model.hf_config, "dtype", None)
        model.dtype = platform.default_dtype(str(stated).removeprefix("torch.") if stated else None)
    elif model.dtype in DTYPES:
        model.dtype = DTYPES[model.dtype]
        # Who names a type wants its arithmetic: no kernels that round activations. (The second time the
        # type is the one that was chosen here.)
        if config.kernel_config.linear_backend == "auto" and not config.is_settled:
            config.kernel_config.linear_backend = "torch"
    else:
        known = ("auto", *DTYPES)
        raise ConfigError(
            f"model_config.dtype is {model.dtype!r}: expected one of {', '.join(known)}{near_miss(model.dtype, known)}",
            code="config-dtype",
        )


def _choose_reasoning_parser(config: VllmConfig, platform: Any) -> None:
    chosen = config.structured_outputs_config
    if chosen.reasoning_parser or chosen.reasoning_parser_plugin:
        # Also in the engine core, whose grammars begin where the reasoning ends.
        choose_parser("reasoning_parsers", chosen.reasoning_parser, chosen.reasoning_parser_plugin)


def _choose_loader(config: VllmConfig, platform: Any) -> None:
    chosen, known = config.load_config.load_format, registry("model_loaders")
    if chosen in known:
        return
    hint = " yet" if chosen in _OTHER_LOAD_FORMATS.split() else near_miss(chosen, known.names())
    raise ConfigError(
        f"load_config.load_format {chosen!r} is not supported{hint}",
        code="config-load-format",
        fix=f"supported: {', '.join(known.names())}; a plugin can register others",
    )


def _bound_context(config: VllmConfig, platform: Any) -> None:
    model = config.model_config
    limit = derived_max_model_len(model.hf_text_config)
    inputs = longest_input(model)
    limit = inputs if limit is None else min(limit, inputs or limit)
    window = model.get_sliding_window()
    if model.disable_sliding_window and window is not None:
        limit = min(limit or window, window)
    if model.max_model_len in (None, -1):
        if limit is None:
            raise ConfigError(
                f"{model.model} does not say how long its context is", code="config-length", fix="give --max-model-len"
            )
        model.max_model_len = platform.check_max_model_len(limit)
    elif model.max_model_len == 0:
        raise ConfigError("model_config.max_model_len is 0: expected at least 1, or -1 for auto", code="config-value")
    elif limit is not None and model.max_model_len > limit:
        _allow_longer(model, limit)
    config.scheduler_config.verify_max_model_len(model.max_model_len or 1)
    config.cache_config.copy_facts(model)
    model.verify_with_parallel_config(config.parallel_config)


def _settle_pooling(config: VllmConfig, platform: Any) -> None:
    settle_pooling(config)


def _allow_longer(model: ModelConfig, limit: int) -> None:
    what = f"model_config.max_model_len is {model.max_model_len}, but the model was made for {limit} tokens"
    if not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        raise ConfigError(
            what,
            code="config-length",
            fix="lower --max-model-len, or set VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if nonsense past that length is fine",
        )
    logger.warning_once("%s; past that length its answers may be nonsense", what)


def _name_model(config: VllmConfig, platform: Any) -> None:
    model = config.model_config
    given = model.served_model_name
    names = given if isinstance(given, list) else [given]
    model.served_model_name = names[0] if names and names[0] else model.model
    if not config.instance_id:
        config.instance_id = uuid.uuid4().hex[:8]


# -- processes and device ----------------------------------------------------------------------------


def _choose_executor(config: VllmConfig, platform: Any) -> None:
    parallel = config.parallel_config
    _choose_replicas(parallel)
    backend = parallel.distributed_executor_backend
    if backend is None:
        parallel.distributed_executor_backend = "uni" if parallel.world_size_across_dp == 1 else "mp"
    elif backend == "uni" and parallel.world_size > 1:
        raise ConfigError(
            f"distributed_executor_backend 'uni' runs one worker; {parallel.world_size} ranks need 'mp'",
            code="config-value",
        )
    elif backend not in ("uni", "mp", "ray", "external_launcher"):
        # A plugin's own class is imported here, as in vLLM: what is wrong with it shows before a model loads.
        load_ref("hardpoint.contracts.executor:Executor").get_class(config)
    choose_async_scheduling(config, platform.device_type)


def _choose_replicas(parallel: ParallelConfig) -> None:
    size, local = parallel.data_parallel_size, parallel.data_parallel_size_local
    if local == 0 and size > 1:
        raise ConfigError(
            f"parallel_config.data_parallel_size is {size}: a server can use one engine that is elsewhere",
            code="config-value",
            fix="leave --data-parallel-size out, or --data-parallel-size-local",
        )
    if local not in (0, 1, size):
        raise ConfigError(
            f"parallel_config.data_parallel_size_local is {local}: all {size} replicas are the server's own",
            code="config-value",
            fix="leave --data-parallel-size-local out",
        )
    parallel.data_parallel_size_local = size if local else 0


def _check_names(config: VllmConfig, platform: Any) -> None:
    """Hold the names of classes against the form that their readers expect, and look for them; nothing is imported.

    They are loaded in other processes, and some only once torch is.
    """
    parallel, scheduler = config.parallel_config, config.scheduler_config.scheduler_cls
    dotted = {"parallel_config.worker_extension_cls": parallel.worker_extension_cls}
    if parallel.worker_cls != "auto":
        dotted["parallel_config.worker_cls"] = parallel.worker_cls
    if isinstance(scheduler, str):
        dotted["scheduler_config.scheduler_cls"] = scheduler
    for path, name in dotted.items():
        if name and ("." not in name.strip(".") or ":" in name):
            raise ConfigError(f"{path} is {name!r}: expected pkg.module.Class", code="config-class-name")
        if name:
            _look_for(path, name, ref_from_qualname(name))
    for name in (config.model_config and config.model_config.logits_processors) or []:
        if isinstance(name, str):
            parse_ref(name)
            _look_for("model_config.logits_processors", name, name)


def _look_for(path: str, name: str, ref: str) -> None:
    why = why_not_found(ref)
    if why is not None:
        raise ConfigError(
            f"{path} is {name!r}: {why}",
            code="config-class-name",
            fix="check the spelling, and that the package is installed in this environment",
        )


def _platform_defaults(config: VllmConfig, platform: Any) -> None:
    platform.apply_config_platform_defaults(config)


def _choose_attention(config: VllmConfig, platform: Any) -> None:
    attention = config.attention_config
    given = attention.backend or envs.VLLM_ATTENTION_BACKEND
    # A member of AttentionBackendEnum crosses to other processes as its name.
    given = getattr(given, "name", given)
    if given is None or given.lower() == "auto":
        attention.backend = None
        return
    known = registry("attention_backends")
    if given not in known:
        raise ConfigError(
            f"attention backend {given!r} is not supported{near_miss(given, known.names())}",
            code="config-attention",
            fix=f"supported: {', '.join(known.names())}; a plugin can register others",
        )
    attention.backend = known.entry(given).name


def _platform_check(config: VllmConfig, platform: Any) -> None:
    config.device_config.device_type = platform.device_type
    platform.check_and_update_config(config)


def _check_result(config: VllmConfig, platform: Any) -> None:
    if config.model_config is not None and config.parallel_config.worker_cls == "auto":
        raise ConfigError(
            f"platform {type(platform).__name__} did not set parallel_config.worker_cls",
            code="platform-worker-cls",
            origin=_author(platform).label,
            fix="set it in check_and_update_config, or give --worker-cls",
        )
    if config.cache_config.block_size is None:
        config.cache_config.block_size = config.cache_config.DEFAULT_BLOCK_SIZE
    wire.check_plain(config.additional_config, "additional_config")
    wire.check_plain(config.plugins_config.settings, "plugins_config.settings")


def _check_supported(config: VllmConfig, platform: Any) -> None:
    # What a platform or plugin wrote since then is its own business.
    if not config.is_settled:
        check_supported(config)


# fmt: off
STEPS = (
    Step("refuse what is not supported",          _check_supported,     always=True),
    Step("read the model's files",                _read_model_files),
    Step("find the tokenizer",                    _find_tokenizer),
    Step("choose the model class",                _choose_model_class),
    Step("let the model's own hook check",        ask_model_hook),
    Step("settle what media prompts may hold",    settle_media),
    Step("choose the number format",              _choose_dtype),
    Step("choose the quantisation",               choose_quantization),
    Step("choose the KV cache's format",          choose_cache_dtype),
    Step("settle adapters",                       settle_adapters),
    Step("choose the loader",                     _choose_loader),
    Step("choose the reasoning parser",           _choose_reasoning_parser),
    Step("bound the context",                     _bound_context),
    Step("settle how the model pools",            _settle_pooling),
    Step("name the model",                        _name_model),
    Step("choose the executor",                   _choose_executor,     always=True),
    Step("check the names of classes",            _check_names,         always=True),
    Step("let the platform set defaults",         _platform_defaults,   always=True, hook=True),
    Step("choose compilation and custom ops",     choose_compilation,  always=True),
    Step("choose the attention backend",          _choose_attention,    always=True),
    Step("let the platform check",                _platform_check,      always=True, hook=True),
    Step("choose device graphs",                  choose_graphs,       always=True),
    Step("check the result",                      _check_result,        always=True),
)
# fmt: on


def replace(config: VllmConfig, **changes: Any) -> VllmConfig:
    """Return a copy with some sections changed, settled anew; the platform's hooks run on it again."""
    changed = copy.copy(config)
    changed.__dict__.pop("_journal", None)
    for name, value in changes.items():
        if name not in type(config).__dataclass_fields__:
            raise ConfigError(f"vllm_config has no field {name!r}", code="config-unknown-field")
        setattr(changed, name, value)
    settle_again(changed)
    return changed
