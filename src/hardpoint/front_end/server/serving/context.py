"""What every service of one server shares: the engine, the model's facts, names, settings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from hardpoint import __version__
from hardpoint.contracts.engine_client import EngineClient
from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.parsers.answers import Parsers
from hardpoint.front_end.server.errors import not_found
from hardpoint.front_end.server.hooks import RequestHooks
from hardpoint.front_end.server.parser_flags import chosen_parsers
from hardpoint.front_end.server.protocol.base import now
from hardpoint.front_end.server.protocol.models import ModelCard, ModelList, ModelPermission
from hardpoint.front_end.server.request_log import RequestLog
from hardpoint.front_end.server.serving.adapters import ServedAdapters
from hardpoint.front_end.server.settings import ServerSettings
from hardpoint.front_end.tokenizers.chat_template import load_chat_template
from hardpoint.types.lora_request import LoRARequest


class RunningRequests:
    """Which engine requests each answered request has in flight."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, list[str]]] = {}
        self._next = 0

    @contextmanager
    def of(self, name: str, engine_ids: list[str]) -> Iterator[None]:
        """Count a request while the block runs; two may carry the same name."""
        self._next += 1
        key = self._next
        self._running[key] = (name, engine_ids)
        try:
            yield
        finally:
            del self._running[key]

    def ids(self, names: list[str]) -> list[str]:
        """Engine ids of the requests named; of all when none is."""
        wanted = set(names)
        return [i for name, ids in self._running.values() if not wanted or name in wanted for i in ids]


@dataclass
class ServerContext:
    """Built once per application, when its engine is there.

    tokenizer                None with --skip-tokenizer-init: ids in, ids out
    default_sampling_params  the model's generation config, where a request says nothing
    """

    engine: EngineClient
    settings: ServerSettings
    tokenizer: Any
    served_names: list[str]
    max_model_len: int
    default_sampling_params: dict[str, Any]
    fingerprint: str | None
    chat_template: str | None
    request_log: RequestLog
    parsers: Parsers
    hooks: RequestHooks = field(default_factory=RequestHooks)
    running: RunningRequests = field(default_factory=RunningRequests)
    adapters: ServedAdapters = field(init=False)
    started: int = field(default_factory=now)

    def __post_init__(self) -> None:
        self.adapters = ServedAdapters(self.engine, self.served_names)

    @classmethod
    def build(cls, engine: EngineClient, settings: ServerSettings) -> ServerContext:
        """Gather what the services need from a running engine."""
        model_config = engine.model_config
        given = model_config.get_diff_sampling_param()
        tokenizer = _tokenizer_of(engine)
        return cls(
            engine=engine,
            settings=settings,
            tokenizer=tokenizer,
            served_names=_names(settings, model_config),
            max_model_len=model_config.max_model_len or 0,
            default_sampling_params=dict(given or {}),
            fingerprint=fingerprint(settings, engine.vllm_config),
            chat_template=load_chat_template(settings.chat_template),
            request_log=RequestLog(settings),
            parsers=chosen_parsers(settings, engine.vllm_config, tokenizer),
            hooks=RequestHooks.build(engine.vllm_config),
        )

    @property
    def model_name(self) -> str:
        """The name answers carry: the first served one."""
        return self.served_names[0]

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises a 404 for one that is neither the model's nor an adapter's."""
        known_name = not name or name in self.served_names or self.adapters.get(name) is not None
        if known_name or envs.VLLM_SKIP_MODEL_NAME_VALIDATION:
            return name or self.model_name
        assert name is not None
        known = ", ".join([*self.served_names, *(adapter.lora_name for adapter in self.adapters.all())][:20])
        raise not_found(f"The model `{name[:200]}` does not exist here; served: {known}", "model")

    async def find_model(self, name: str | None) -> str:
        """As `check_model`, after an unknown name was looked for among the adapters that resolvers know."""
        if name and name not in self.served_names:
            await self.adapters.find(name)
        return self.check_model(name)

    def check_priority(self, priority: int) -> int:
        """The priority itself; refused where the scheduler would not look at it."""
        if priority != 0 and self.engine.vllm_config.scheduler_config.policy != "priority":
            raise VLLMValidationError(
                "priority needs a server started with --scheduling-policy priority", parameter="priority"
            )
        return priority

    def model_list(self) -> ModelList:
        """The answer of /v1/models."""
        root = self.engine.model_config.model
        cards = [
            ModelCard(
                id=name,
                created=self.started,
                root=root,
                max_model_len=self.max_model_len,
                permission=[ModelPermission(created=self.started)],
            )
            for name in self.served_names
        ]
        return ModelList(data=[*cards, *(self._card_of(adapter) for adapter in self.adapters.all())])

    def _card_of(self, adapter: LoRARequest) -> ModelCard:
        return ModelCard(
            id=adapter.lora_name,
            created=self.started,
            root=adapter.lora_path,
            parent=adapter.base_model_name or self.model_name,
            permission=[ModelPermission(created=self.started)],
        )


def _tokenizer_of(engine: EngineClient) -> Any:
    if engine.model_config.skip_tokenizer_init:
        return None
    return cast("Any", engine).get_tokenizer()


def _names(settings: ServerSettings, model_config: Any) -> list[str]:
    # The engine's configuration keeps the first name only.
    served = settings.served_model_name or model_config.served_model_name
    if isinstance(served, str):
        return [served]
    return list(served) if served else [model_config.model]


def fingerprint(settings: ServerSettings, vllm_config: Any) -> str | None:
    """`system_fingerprint`: what an answer's text may depend on, besides the request."""
    mode = settings.fingerprint_mode
    if mode in ("none", "custom"):
        return settings.fingerprint_value if mode == "custom" else None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    facts = [
        __version__, model.model, model.revision, str(model.dtype), model.quantization, model.max_model_len,
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
    ]  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    if mode == "hash":
        return f"fp_{digest}"
    ranks = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}"
    return f"hardpoint-{__version__}-{ranks}-{digest}"
