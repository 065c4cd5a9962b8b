"""The front end's flags as one typed object; everything under `server/` reads these, not the namespace."""

from __future__ import annotations

import dataclasses
import ssl
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from hardpoint.env import envs
from hardpoint.errors import ConfigError
from hardpoint.front_end.server.lora_modules import LoRAModulePath, parse_lora_modules
from hardpoint.log import init_logger

logger = init_logger(__name__)

FINGERPRINT_MODES = ("full", "hash", "custom", "none")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Field names are flag names; defaults are those of the flags."""

    host: str | None = None
    port: int = 8000
    uds: str | None = None
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    disable_access_log_for_endpoints: str | None = None
    allow_credentials: bool = False
    allowed_origins: list[str] = field(default_factory=list)
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    api_key: list[str] | None = field(default=None, repr=False)
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    enable_ssl_refresh: bool = False
    ssl_cert_reqs: int = int(ssl.CERT_NONE)
    ssl_ciphers: str | None = None
    root_path: str | None = None
    middleware: list[str] = field(default_factory=list)
    enable_request_id_headers: bool = False
    disable_fastapi_docs: bool = False
    h11_max_incomplete_event_size: int = 4194304
    h11_max_header_count: int = 256
    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    trust_request_chat_template: bool = False
    trust_request_mm_kwargs: bool = False
    default_chat_template_kwargs: dict[str, Any] | None = None
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    enable_server_load_tracking: bool = False
    enable_force_include_usage: bool = False
    sse_keep_alive_interval: int = 0
    enable_tokenizer_info_endpoint: bool = False
    log_error_stack: bool = False
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    enable_log_deltas: bool = True
    max_log_len: int | None = None
    served_model_name: list[str] | str | None = None
    disable_log_stats: bool = False
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    tool_parser_plugin: str = ""
    enable_lora: bool = False
    lora_modules: list[str] = field(default_factory=list)
    exclude_tools_when_tool_choice_none: bool = False
    shutdown_timeout: int = 0

    @classmethod
    def from_args(cls, args: Namespace) -> ServerSettings:
        """Read the flags a namespace has; a missing or None one keeps its default.

        Raises ConfigError for combinations that cannot work.
        """
        given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(cls)}
        settings = cls(**{name: value for name, value in given.items() if value is not None})
        settings._check()
        return settings

    def _check(self) -> None:
        if self.fingerprint_mode not in FINGERPRINT_MODES:
            raise ConfigError(
                f"--fingerprint-mode {self.fingerprint_mode!r} is none of {', '.join(FINGERPRINT_MODES)}",
                code="flag-value",
            )
        if self.fingerprint_mode == "custom" and not self.fingerprint_value:
            raise ConfigError(
                "--fingerprint-mode custom needs a text", code="flag-missing", fix="add --fingerprint-value TEXT"
            )
        if self.api_key is not None and any(not key for key in self.api_key):
            raise ConfigError(
                "--api-key is an empty text, which would leave the server open",
                code="flag-value",
                fix="give a key, or leave the flag out to serve without one",
            )
        names = [self.served_model_name] if isinstance(self.served_model_name, str) else self.served_model_name
        if names is not None and not all(names):
            raise ConfigError("--served-model-name is an empty text", code="flag-value", fix="give a name")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("--lora-modules needs adapters to be on", code="flag-missing", fix="add --enable-lora")
        self.adapter_modules()
        self._check_tls()
        if self.sse_keep_alive_interval < 0:
            raise ConfigError("--sse-keep-alive-interval must be at least 0", code="flag-value")

    def _check_tls(self) -> None:
        if self.ssl_keyfile or self.ssl_certfile:
            return
        of_tls = ("ssl_ca_certs", "enable_ssl_refresh", "ssl_cert_reqs", "ssl_ciphers")
        defaults = {one.name: one.default for one in dataclasses.fields(self)}
        for name in of_tls:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"--{name.replace('_', '-')} says nothing without a certificate",
                    code="flag-missing",
                    fix="add --ssl-certfile FILE and --ssl-keyfile FILE",
                )

    def adapter_modules(self) -> list[LoRAModulePath]:
        """The adapters to serve from the start; ConfigError for one that cannot be read."""
        names = [self.served_model_name] if isinstance(self.served_model_name, str) else self.served_model_name
        return parse_lora_modules(self.lora_modules, names or ())

    def accepted_keys(self) -> tuple[str, ...]:
        """The bearer keys; those of the flag, else VLLM_API_KEY. Empty = no key needed."""
        if self.api_key:
            return tuple(self.api_key)
        key = envs.VLLM_API_KEY
        if key == "":
            logger.warning("VLLM_API_KEY is set but empty: the server accepts requests without a key")
        return (key,) if key else ()

    def unlogged_paths(self) -> frozenset[str]:
        """Paths whose requests are left out of the access log."""
        return frozenset(path.strip() for path in (self.disable_access_log_for_endpoints or "").split(",") if path)
