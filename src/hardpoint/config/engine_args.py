"""What `LLM(...)` and `hardpoint serve` take: `EngineArgs`, made from the table of flags, to a `VllmConfig`."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from hardpoint.config import flags
from hardpoint.config.adapters import adapters_section
from hardpoint.config.arguments import add_flag, add_plugin_flags, check_refused, plugin_words
from hardpoint.config.connectors import check_connector
from hardpoint.config.flags import ENGINE_FLAGS, FLAGS, MODEL, Flag, reason
from hardpoint.config.media import media_section
from hardpoint.config.sections import (
    CompilationConfig,
    LoggingConfig,
    ModelConfig,
    PluginsConfig,
    SchedulerConfig,
    Section,
    VllmConfig,
    from_mapping,
    near_miss,
)
from hardpoint.config.sections.base import check_value, field_types, section_type
from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.extensions import plugin_config
from hardpoint.extensions.boot import load_general_plugins, set_policy
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.parser_files import import_parser_file
from hardpoint.extensions.refs import load_ref
from hardpoint.log import configure

# Token budget and requests of a step where the user leaves them open: (kind of use, on a CPU).
# Whoever streams waits for the prompts of others one step at a time: on a CPU 256 tokens keep that to a fraction
# of a second, and cost next to nothing, since a step of 256 tokens computes as many a second as one of 1024.
_BUDGET = {("server", True): 256, ("script", True): 2048, ("server", False): 2048, ("script", False): 8192}
_REQUESTS = {"server": 128, "script": 256}
_OTHER = tuple(flag for flag in FLAGS if flag not in ENGINE_FLAGS)


# Values that stay out of logs and the ledger; a plugin's settings may hold a key of its own.
_SECRET = {"hf_token", "plugin_config"}


class UnknownArgument(ConfigError, TypeError):
    """A keyword that no engine argument has."""


def _field(flag: Flag) -> tuple[str, Any, Any]:
    if isinstance(flag.default, (list, dict, set)):
        default = flag.default
        return flag.dest, Any, dataclasses.field(default_factory=lambda: copy.deepcopy(default))
    return flag.dest, Any, dataclasses.field(default=flag.default, repr=flag.dest not in _SECRET)


if TYPE_CHECKING:

    class _Arguments:
        """Stands for the generated fields, which a type checker cannot see."""

        model: str

        def __init__(self, *args: Any, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    # The empty __post_init__ makes the generated constructor call that of the class below.
    _Arguments = dataclasses.make_dataclass(
        "_Arguments",
        [_field(flag) for flag in (MODEL, *ENGINE_FLAGS)],
        namespace={"__post_init__": lambda self: None},
    )


class EngineArgs(_Arguments):
    """Engine arguments under vLLM's names; a dataclass whose every field is a row of the table of flags.

    Making one loads the general plugins, which may add what the arguments name.
    Raises `UnknownArgument` (a TypeError naming the near miss) and `ConfigError`.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse unknown keywords before the generated constructor does, with the near miss."""
        known = _names(cls)
        for name in values:
            if name not in known:
                raise _unknown(name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        policy = self.plugin_policy
        if policy is not None:
            set_policy(policy)
        self._apply_logging()
        plugin_config.deliver(self.plugin_config)
        load_general_plugins()
        if self.data_parallel_size_local not in (None, 0, self.data_parallel_size):
            raise ConfigError(
                f"data_parallel_size_local={self.data_parallel_size_local} is refused: all of the "
                f"{self.data_parallel_size} replicas are the server's own, or one that is elsewhere",
                code="config-unsupported",
                fix="leave it out",
            )
        for flag in ENGINE_FLAGS:
            value = getattr(self, flag.dest)
            if not isinstance(value, Section) and not flag.allows(value):
                check_connector(flag.dest, value)
                raise ConfigError(
                    f"{flag.dest}={value!r} is refused: {reason(flag)}", code="config-unsupported", fix="leave it out"
                )

    def _apply_logging(self) -> None:
        """Bring what the arguments say about logs into force, here and in the processes started later."""
        given = self.logging_config
        if given is None and self.log_level is None and self.log_config_file is None:
            return
        logs = (
            given if isinstance(given, LoggingConfig) else from_mapping(LoggingConfig, {} if given is None else given)
        )
        level = (self.log_level or logs.log_level).upper()
        path = self.log_config_file or logs.pylogging_config_file
        os.environ["VLLM_LOGGING_LEVEL"] = level
        os.environ["HARDPOINT_LOGGING_FORMAT"] = logs.formatter
        os.environ["VLLM_CONFIGURE_LOGGING"] = str(int(logs.configure_logging))
        if path is not None:
            os.environ["VLLM_LOGGING_CONFIG_PATH"] = path
        configure()

    # -- command line ------------------------------------------------------------------------------

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        """Add the engine's flags to a parser, in groups. Returns the parser."""
        if not any("--model" in action.option_strings for action in parser._actions):
            parser.add_argument("--model", dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        for title, rows in flags.GROUPS.items():
            add_flags(parser, title, rows)
        add_plugin_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Take the engine's flags out of parsed arguments. Raises `FlagError` for what is refused."""
        check_refused(ENGINE_FLAGS, args)
        names = _names(cls)
        values = {name: value for name, value in vars(args).items() if name in names}
        return cls(**{**values, "plugin_config": plugin_words(args) or None})

    # -- configuration -----------------------------------------------------------------------------

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """Build, settle and seal the configuration.

        usage_context  "server" or "script" (or vLLM's enum of the same meaning): decides the defaults
        Raises `ConfigError` or `ModelFileError`.
        """
        platform = load_ref("hardpoint.platforms:current_platform")
        platform.pre_register_and_update()
        platform.validate_environ(bool(self.fail_on_environ_validation))
        if self.tool_parser_plugin:
            import_parser_file(self.tool_parser_plugin, "tool_parsers")
        parts = self._sections(_use(usage_context), platform)
        self._record()
        return VllmConfig(**parts)

    def create_model_config(self) -> ModelConfig:
        """The model's part of the configuration alone, settled: facts, number format, context, quantisation.

        Raises as `create_engine_config`, which reads the model's files again.
        """
        return self.create_engine_config().model_config

    def _sections(self, use: str, platform: Any) -> dict[str, Any]:
        values = self._by_section()
        parts: dict[str, Any] = values.pop("", {})
        parts["lora_config"] = adapters_section(self, values.pop("lora_config", {}))
        scheduler = {"max_model_len": 1, "is_encoder_decoder": False, **self._budget(use, platform)}
        parts["scheduler_config"] = SchedulerConfig(**{**scheduler, **values.pop("scheduler_config", {})})
        types = field_types(VllmConfig)
        for name, fields in values.items():
            kind = section_type(types[name])
            given = parts.get(name)
            assert kind is not None, name
            if given is None:
                parts[name] = kind(**fields)
                continue
            if isinstance(given, dict):
                given = parts[name] = from_mapping(kind, given)
            defaults = {field.name: field.default for field in dataclasses.fields(cast("Any", kind))}
            for field, value in fields.items():
                # A flag that was not given says nothing against the section.
                if value != defaults[field]:
                    setattr(given, field, value)
            given.check()
        parts["plugins_config"] = self._plugins()
        parts["model_config"].model = self.model
        parts["model_config"].multimodal_config = media_section(self)
        return parts

    def _by_section(self) -> dict[str, dict[str, Any]]:
        """Collect what was given, by section: values of fields, and whole sections under ""."""
        values: dict[str, dict[str, Any]] = {"model_config": {"model": self.model}, "": {}}
        for flag in ENGINE_FLAGS:
            value = getattr(self, flag.dest)
            if not flag.field or flag.field.startswith(("plugins_config", "offload_config.")) or value is None:
                continue
            section, _, field = flag.field.rpartition(".")
            values.setdefault(section, {})[field] = _read_value(flag, value)
        return values

    def _budget(self, use: str, platform: Any) -> dict[str, int]:
        requests = self.max_num_seqs or min(_REQUESTS[use], self.max_num_batched_tokens or _REQUESTS[use])
        tokens = _BUDGET[use, platform.device_type == "cpu"]
        if self.enable_chunked_prefill is False and self.max_model_len:
            tokens = max(tokens, self.max_model_len)
        return {"max_num_seqs": requests, "max_num_batched_tokens": max(tokens, requests)}

    def _plugins(self) -> PluginsConfig:
        policy = self.plugin_policy or envs.HARDPOINT_PLUGIN_POLICY
        return PluginsConfig(policy=policy, settings=plugin_config.plain_settings())

    def _record(self) -> None:
        """Tell the ledger which fields the user chose."""
        for flag in ENGINE_FLAGS:
            value = getattr(self, flag.dest)
            if flag.field and value != flag.default:
                shown = "a secret" if flag.dest in _SECRET else repr(value)
                detail = f"{shown} from {flag.names[0]}"
                for path in self._paths(flag):
                    ledger.record("config_write", "config", path, detail=detail)

    def _paths(self, flag: Flag) -> list[str]:
        if flag.dest != "plugin_config":
            return [flag.field]
        given = plugin_config.plain_settings(self.plugin_config)
        return [f"{flag.field}.{name}.{key}" for name, own in given.items() for key in own]


class AsyncEngineArgs(EngineArgs):
    """Engine arguments of the asynchronous engine."""

    @staticmethod
    def add_cli_args(parser: Any, async_args_only: bool = False) -> Any:
        """Load the general plugins, add the engine's flags, let the platform add its own. Returns the parser."""
        load_general_plugins()
        if not async_args_only:
            EngineArgs.add_cli_args(parser)
        load_ref("hardpoint.platforms:current_platform").pre_register_and_update(parser)
        return parser


def add_front_end_args(parser: Any) -> Any:
    """Add the flags of the HTTP server. Returns the parser."""
    for title, rows in flags.FRONT_END.items():
        add_flags(parser, title, rows)
    return parser


def add_flags(parser: Any, title: str, rows: tuple[Flag, ...]) -> None:
    """Add rows of the table to a parser, under a title of the help."""
    group = parser.add_argument_group(title)
    for row in rows:
        add_flag(group, row)


def _unknown(name: str, known: set[str]) -> ConfigError:
    other = next((flag for flag in _OTHER if flag.dest == name), None)
    if other is not None:
        return UnknownArgument(
            f"{name!r} is an option of the HTTP server, not of the engine", code="config-unknown-argument"
        )
    text = f"there is no engine argument {name!r}{near_miss(name, known)}"
    return UnknownArgument(text, code="config-unknown-argument")


def _names(cls: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def _use(context: Any) -> str:
    text = str(getattr(context, "value", context) or "server").lower()
    return "script" if "llm_class" in text or "script" in text else "server"


def _read_value(flag: Flag, value: Any) -> Any:
    """Turn a flag's value into what its field holds: JSON into sections, words into numbers."""
    if flag.kind is CompilationConfig and not isinstance(value, (dict, Section)):
        value = {"mode": value}
    if isinstance(flag.kind, type) and isinstance(value, dict):
        return from_mapping(flag.kind, value)
    if flag.field == "logging_config.log_level":
        return str(value).upper()
    if flag.field == "model_config.logits_processors" and not isinstance(value, list):
        return [value]
    if flag.dest == "ignore_patterns" and isinstance(value, str):
        return [value]
    if isinstance(flag.kind, tuple):
        return check_value(flag.dest, value, Literal[flag.kind])
    # The caller's own lists and sections stay as they are, whatever happens to the configuration.
    return copy.deepcopy(value) if isinstance(value, (list, dict, set, Section)) else value
