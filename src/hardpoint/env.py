"""The table of environment variables, read when asked for, never at import.

`envs.VLLM_PORT` reads the process environment at each access, so a test or a plugin that
changes it is seen. A value that does not parse is a `ConfigError` naming the variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hardpoint.errors import ConfigError


class Variable(NamedTuple):
    """One environment variable: how to read it and what it is for."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "yes", "on"):
        return True
    if lowered in ("", "false", "no", "off"):
        return False
    return bool(int(lowered))


def _words(text: str) -> list[str]:
    # Not stripped: what vLLM compares plugin names with, and reported where it matters.
    return text.split(",")


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text.strip().lower()

    return parse


_level_name = _choice("critical", "error", "warning", "info", "debug", "notset")


def _level(text: str) -> str:
    return _level_name(text).upper()


# fmt: off
VARIABLES = (
    Variable("VLLM_PLUGINS", _words, None, "comma list of plugin names to load; unset = all; empty = none"),
    Variable("VLLM_LOGGING_LEVEL", _level, "INFO", "default log level"),
    Variable("VLLM_CONFIGURE_LOGGING", _flag, True, "0 leaves logging alone"),
    Variable("VLLM_LOGGING_CONFIG_PATH", str, None, "dictConfig JSON"),
    Variable("VLLM_LOGGING_PREFIX", str, "", "text before each line"),
    Variable("VLLM_LOGGING_STREAM", str, "ext://sys.stdout", "target stream"),
    Variable("VLLM_LOGGING_COLOR", str, "auto", "auto, 1, 0"),
    Variable("VLLM_DISABLE_LOG_LOGO", _flag, False, "no banner"),
    Variable("VLLM_LOG_STATS_INTERVAL", float, 10.0, "seconds between stats lines"),
    Variable("VLLM_LOG_BATCHSIZE_INTERVAL", float, -1, "batch-size log; -1 = off"),
    Variable("VLLM_HOST_IP", str, "", "address where ranks on several machines meet, on the machine of the first one"),
    Variable("VLLM_PORT", int, None, "first port for internal use"),
    Variable("VLLM_LOOPBACK_IP", str, "", "loopback address"),
    Variable("VLLM_RPC_BASE_PATH", str, None, "folder of IPC sockets"),
    Variable("VLLM_CACHE_ROOT", str, None, "cache folder (follows XDG_CACHE_HOME)"),
    Variable("VLLM_CONFIG_ROOT", str, None, "config folder (follows XDG_CONFIG_HOME)"),
    Variable("VLLM_ASSETS_CACHE", str, None, "asset folder"),
    Variable("VLLM_MODEL_REDIRECT_PATH", str, None, "file mapping model ids to folders"),
    Variable("VLLM_USE_MODELSCOPE", _flag, False, "other hub"),
    Variable("VLLM_NO_USAGE_STATS", _flag, False, "no usage report"),
    Variable("VLLM_DO_NOT_TRACK", _flag, False, "no usage report (also DO_NOT_TRACK)"),
    Variable("VLLM_USAGE_SOURCE", str, "production", "label in the report"),
    Variable("VLLM_API_KEY", str, None, "key when `--api-key` is not given"),
    Variable("VLLM_SERVER_DEV_MODE", _flag, False, "adds dev and RL routes"),
    Variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", _flag, False, "adds LoRA load/unload routes"),
    Variable("VLLM_LORA_RESOLVER_CACHE_DIR", str, None, "folder searched for unknown adapter names"),
    Variable("VLLM_LORA_RESOLVER_HF_REPO_LIST", str, None, "repositories allowed for adapters"),
    Variable("VLLM_SKIP_MODEL_NAME_VALIDATION", _flag, False, "any `model` value accepted"),
    Variable("VLLM_DEBUG_LOG_API_SERVER_RESPONSE", _flag, False, "log responses"),
    Variable("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", _flag, False, "API stays up after engine death"),
    Variable("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", int, 5, "seconds"),
    Variable("VLLM_ENGINE_READY_TIMEOUT_S", int, 600, "start-up wait"),
    Variable("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", float, 30.0, "seconds; 0 = none"),
    Variable("VLLM_MAX_N_SEQUENCES", int, 16384, "limit on n"),
    Variable("VLLM_MAX_COMPLETION_PROMPTS", int, 1024, "limit on prompt list"),
    Variable("VLLM_MAX_STOP_STRINGS", int, 4, "limit on stop"),
    Variable("VLLM_MAX_NUM_BAD_WORDS", int, 128, "limit on bad_words"),
    Variable("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", int, 1024, "limit on their ids"),
    Variable("VLLM_ALLOW_LONG_MAX_MODEL_LEN", _flag, False, "let max-model-len exceed the model's"),
    Variable("VLLM_ENABLE_V1_MULTIPROCESSING", _flag, True, "engine core in its own process"),
    Variable("VLLM_WORKER_MULTIPROC_METHOD", str, "fork", "fork or spawn"),
    Variable("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", int, 5, "wait at exit"),
    Variable("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", int, 300, "step timeout with mp executor"),
    Variable("VLLM_MQ_MAX_CHUNK_BYTES_MB", int, 16, "shared-memory queue chunk"),
    Variable("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", int, 256, "bytes sent inline"),
    Variable("VLLM_ALLOW_INSECURE_SERIALIZATION", _flag, False, "pickle in RPC (callables in collective_rpc)"),
    Variable("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", int, 128, "outputs per asyncio turn"),
    Variable("VLLM_USE_V2_MODEL_RUNNER", _flag, None, "force V1/V2 runner; unset = by config"),
    Variable("VLLM_TARGET_DEVICE", str, "cuda", "build/run target"),
    Variable("VLLM_CPU_KVCACHE_SPACE", int, None, "CPU KV space in GiB; when set it becomes `kv_cache_memory_bytes`"),
    Variable("VLLM_CPU_OMP_THREADS_BIND", str, "auto", "cores per rank, ranks split by a bar; auto, nobind"),
    Variable("VLLM_CPU_NUM_OF_RESERVED_CPU", int, None, "cores kept free"),
    Variable("VLLM_CPU_ATTN_SPLIT_KV", _flag, True, "split KV in CPU attention"),
    Variable("VLLM_CPU_INT4_W4A8", _flag, True, "int4 kernel choice on CPU"),
    Variable("VLLM_KV_CACHE_LAYOUT", str, None, "force a layout (LBNHC, LBHNC, ...; NHD, HND)"),
    Variable("VLLM_BATCH_INVARIANT", _flag, False, "deterministic regardless of batch"),
    Variable("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", str, "", "route tokens to experts by this strategy, to measure"),
    Variable("VLLM_FLOAT32_MATMUL_PRECISION", str, "highest", "highest, high, medium"),
    Variable("VLLM_COMPUTE_NANS_IN_LOGITS", _flag, False, "count NaNs"),
    Variable("VLLM_RAISE_ON_LOGIT_NANS", _flag, False, "raise on NaN"),
    Variable("VLLM_DISABLE_COMPILE_CACHE", _flag, False, "Inductor compiles anew, whatever it has in its cache of graphs"),
    Variable("VLLM_PP_LAYER_PARTITION", str, None, "layers per stage"),
    Variable("VLLM_DISABLED_KERNELS", _words, (), "kernel names to skip"),
    Variable("VLLM_TUNED_CONFIG_FOLDER", str, None, "tuned kernel files"),
    Variable("VLLM_XGRAMMAR_CACHE_MB", int, 512, "grammar cache"),
    Variable("VLLM_REGEX_COMPILATION_TIMEOUT_S", int, 5, "grammar regex limit"),
    Variable("VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS", int, 1, "tool parser limit"),
    Variable("VLLM_ENFORCE_STRICT_TOOL_CALLING", _flag, True, "honour per-tool strict"),
    Variable("VLLM_IMAGE_FETCH_TIMEOUT", int, 5, "seconds"),
    Variable("VLLM_VIDEO_FETCH_TIMEOUT", int, 30, "seconds"),
    Variable("VLLM_AUDIO_FETCH_TIMEOUT", int, 10, "seconds"),
    Variable("VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", int, 25, "upload limit"),
    Variable("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", int, 256, "download limit"),
    Variable("VLLM_MEDIA_URL_ALLOW_REDIRECTS", _flag, True, "follow redirects"),
    Variable("VLLM_MEDIA_CONNECTOR", str, "http", "registered media connector"),
    Variable("VLLM_VIDEO_LOADER_BACKEND", str, "opencv", "registered video loader"),
    Variable("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", _flag, True, "ints instead of bytes in events"),
    Variable("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", _flag, False, "keep ids equal across instances"),
    Variable("VLLM_DP_RANK", int, 0, "DP without flags"),
    Variable("VLLM_DP_SIZE", int, 1, "DP without flags"),
    Variable("VLLM_DP_MASTER_IP", str, "127.0.0.1", "DP without flags"),
    Variable("VLLM_DP_MASTER_PORT", int, 0, "DP without flags"),
    Variable("VLLM_ENABLE_RESPONSES_API_STORE", _flag, False, "keep responses for GET"),
    Variable("VLLM_ENABLE_COHERE_API", _flag, False, "adds /cohere/v2/chat"),
    Variable("VLLM_SYSTEM_START_DATE", str, None, "fixed date in Harmony prompts"),
    Variable("VLLM_TRACE_FUNCTION", _flag, False, "function trace"),
    Variable("VLLM_NIXL_SIDE_CHANNEL_HOST", str, "localhost", "connector address"),
    Variable("VLLM_NIXL_SIDE_CHANNEL_PORT", int, 5600, "connector port"),
    Variable("VLLM_USE_RUST_FRONTEND", _flag, False, "other front end"),
    Variable("HARDPOINT_PLUGINS_DENY", _words, None, "comma list of plugin names that must not load, whatever VLLM_PLUGINS says"),
    Variable("HARDPOINT_PLUGIN_POLICY", _choice("compatible", "strict"), "compatible", "compatible, or strict: every plugin skip stops the process"),
    Variable("HARDPOINT_PLUGIN_CONFIG", str, None, 'settings of plugins as JSON, such as {"acme": {"threshold": 0.5}}; --plugin-config adds to them'),
    Variable("HARDPOINT_CPU_KERNELS", _choice("auto", "off", "avx512", "avx2", "neon", "generic"), "auto", "the compiled CPU kernels: auto, off (layers compute in torch), or the instruction set to use"),
    Variable("HARDPOINT_LINK_KEY", str, None, "secret that an engine of --headless and its front end share, of at least 16 characters; needed between machines"),
    Variable("HARDPOINT_MAX_BODY_MB", int, 64, "largest request body, in MiB; 413 beyond"),
    Variable("HARDPOINT_LOGGING_FORMAT", _choice("text", "json"), "text", "text or json lines; set by --logging-config"),
    Variable("HARDPOINT_CACHE", str, None, "cache folder for models and facts; default ~/.cache/hardpoint (follows XDG_CACHE_HOME)"),
    Variable("VLLM_ATTENTION_BACKEND", str, None, "attention backend name; the flag wins"),
)
# fmt: on

# What they ask for is what happens anyway: no banner, no usage report.
ALWAYS_SO = frozenset({"VLLM_DISABLE_LOG_LOGO", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"})

# vLLM's variables that this version knows and does not read; setting one is told in a warning.
UNREAD = frozenset({
    "VLLM_ASSETS_CACHE", "VLLM_AUDIO_FETCH_TIMEOUT", "VLLM_BATCH_INVARIANT", "VLLM_CONFIG_ROOT", "VLLM_CPU_ATTN_SPLIT_KV",
    "VLLM_CPU_INT4_W4A8", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_DISABLED_KERNELS", "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_SIZE", "VLLM_ENABLE_COHERE_API",
    "VLLM_ENFORCE_STRICT_TOOL_CALLING", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_KV_CACHE_LAYOUT", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "VLLM_LOG_BATCHSIZE_INTERVAL", "VLLM_LOOPBACK_IP",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB", "VLLM_MEDIA_CONNECTOR",
    "VLLM_MODEL_REDIRECT_PATH", "VLLM_MQ_MAX_CHUNK_BYTES_MB",
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_PORT",
    "VLLM_RAISE_ON_LOGIT_NANS", "VLLM_SYSTEM_START_DATE",
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS", "VLLM_TRACE_FUNCTION", "VLLM_TUNED_CONFIG_FOLDER", "VLLM_USAGE_SOURCE",
    "VLLM_USE_MODELSCOPE", "VLLM_USE_RUST_FRONTEND", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_VIDEO_FETCH_TIMEOUT",
    "VLLM_VIDEO_LOADER_BACKEND", "VLLM_WORKER_MULTIPROC_METHOD",
})  # fmt: skip

# Read by plugins, containers and vLLM's own build, never by a running server.
_IGNORED_PREFIXES = ("VLLM_PLUGIN_", "VLLM_VERSION", "VLLM_BUILD", "VLLM_WHEEL", "VLLM_SOURCE")
_BY_NAME = {variable.name: variable for variable in VARIABLES}


class Environment:
    """Attribute access to the table above."""

    def __getattr__(self, name: str) -> Any:
        variable = _BY_NAME.get(name)
        if variable is None:
            raise AttributeError(f"no environment variable {name!r} is known")
        text = os.environ.get(name)
        if text is None:
            return variable.default
        try:
            return variable.parse(text)
        except ValueError as error:
            raise ConfigError(
                f"environment variable {name}={text!r} cannot be read: {error}",
                code="env-value",
                origin="the process environment",
                fix=f"{name}: {variable.help}",
            ) from None

    def is_set(self, name: str) -> bool:
        """Whether the process environment has the variable."""
        return name in os.environ

    def unread(self) -> list[str]:
        """Variables of vLLM's that are set and that this version knows and does not read."""
        return sorted(UNREAD & os.environ.keys())

    def unknown(self) -> list[str]:
        """Variables that are set, look like vLLM's, and that nobody knows."""
        return sorted(
            name
            for name in os.environ
            if name.startswith("VLLM_") and name not in _BY_NAME and not name.startswith(_IGNORED_PREFIXES)
        )

    def __dir__(self) -> list[str]:
        return sorted(_BY_NAME)


envs = Environment()


def __getattr__(name: str) -> Any:
    # Plugins read `vllm.envs.VLLM_X` as a module attribute.
    return getattr(envs, name)


def cache_root() -> Path:
    """Where models and derived facts are kept."""
    given = envs.HARDPOINT_CACHE or envs.VLLM_CACHE_ROOT
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hardpoint"
