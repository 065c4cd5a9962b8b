"""The adapters a server answers to: those of `--lora-modules`, those loaded since, those that resolvers find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from hardpoint.contracts.engine_client import EngineClient
from hardpoint.env import envs
from hardpoint.errors import ConfigError, EngineDeadError, HardpointError, ModelFileError, without_origin
from hardpoint.extensions.registry import registry
from hardpoint.front_end.adapters import with_local_files
from hardpoint.front_end.server.errors import ApiError, not_found, sanitise
from hardpoint.front_end.server.lora_modules import LoRAModulePath
from hardpoint.log import init_logger
from hardpoint.types.lora_request import LoRARequest

logger = init_logger(__name__)

# Longer names of models are not looked for.
_LONGEST_NAME = 512


class ServedAdapters:
    """Adapter name -> what the engine is asked with. One event loop uses it."""

    def __init__(self, engine: EngineClient, base_names: Sequence[str]) -> None:
        self._engine = engine
        self._base_names = base_names
        self._served: dict[str, LoRARequest] = {}
        self._last_id = 0
        # Names being loaded, unloaded or looked for: whoever wants the same waits for the first.
        self._changing: dict[str, asyncio.Lock] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    @property
    def is_on(self) -> bool:
        """Whether the engine takes adapters."""
        return getattr(self._engine.vllm_config, "lora_config", None) is not None

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter of a name; None for a name that is none's."""
        return self._served.get(name) if name else None

    def all(self) -> list[LoRARequest]:
        """In the order they were loaded."""
        return list(self._served.values())

    # Loading.

    async def load_modules(self, modules: Sequence[LoRAModulePath]) -> None:
        """Load those of the command line. Raises the HardpointError of the first that cannot be loaded."""
        for module in modules:
            await self._load(module.name, module.path, module.base_model_name)

    async def load(self, name: str, path: str, in_place: bool) -> None:
        """Load an adapter for a client. Raises ApiError: 400 for what is wrong with it, 404 where there is none."""
        if not self.is_on:
            raise _bad("this server was started without --enable-lora", "lora_name")
        if not name or not path:
            raise _bad("Both 'lora_name' and 'lora_path' must be provided.", "lora_path" if name else "lora_name")
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise _bad(f"lora_name must have at most {_LONGEST_NAME} printable characters", "lora_name")
        if name in self._base_names:
            raise _bad(f"The name '{name}' is the base model's.", "lora_name")
        async with self._changing.setdefault(name, asyncio.Lock()):
            if name in self._served and not in_place:
                raise _bad(
                    f"The lora adapter '{name}' has already been loaded. Set 'load_inplace' to replace it.", "lora_name"
                )
            try:
                await self._load(name, path, None)
            except EngineDeadError:
                raise
            except ModelFileError as error:
                if error.code == "lora-missing":
                    raise not_found(_told(error), "lora_path") from None
                raise _bad(_told(error), "lora_path") from None
            except HardpointError as error:
                raise _bad(_told(error), "lora_path") from None

    async def _load(self, name: str, path: str, base_model_name: str | None) -> None:
        known = self._served.get(name)
        number = known.lora_int_id if known is not None else self._new_id()
        wanted = LoRARequest(name, number, path, base_model_name)
        wanted = await asyncio.to_thread(with_local_files, wanted)
        if not (Path(wanted.lora_path) / "adapter_config.json").is_file():
            raise ModelFileError(
                f"adapter {name!r}: {path!r} has no adapter_config.json",
                code="lora-missing",
                fix="give the folder that PEFT's save_pretrained wrote",
            )
        await self._engine.add_lora(msgspec.structs.replace(wanted, load_inplace=known is not None))
        self._served[name] = wanted
        logger.info("adapter %r is served from %s", name, wanted.lora_path)

    async def unload(self, name: str) -> None:
        """Serve an adapter no more; requests that have it run to their end. Raises ApiError for an unknown name."""
        if not name:
            raise _bad("'lora_name' must be provided.", "lora_name")
        async with self._changing.setdefault(name, asyncio.Lock()):
            known = self._served.pop(name, None)
            if known is None:
                raise not_found(f"The lora adapter '{name[:200]}' cannot be found.", "lora_name")
            try:
                await cast("Any", self._engine).remove_lora(known.lora_int_id)
            except ConfigError as error:
                # Requests have it still: it leaves memory when room is needed.
                logger.info("adapter %r: %s", name, error.what)
        self._changing.pop(name, None)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # Looking for names that nobody has loaded.

    async def find(self, name: str) -> LoRARequest | None:
        """The adapter of a name, asking the resolvers for one that is not served; None when nobody knows it.

        Raises ApiError (400) for one that was found and cannot be loaded. Many who ask at once load it once.
        """
        if name not in self._served and self._may_look(name):
            task = self._looking.get(name)
            if task is None:
                task = self._looking[name] = asyncio.create_task(self._look(name))
                task.add_done_callback(self._looked(name))
            # Whoever leaves must not take the others' answer along.
            await asyncio.shield(task)
        return self._served.get(name)

    def _looked(self, name: str) -> Callable[[asyncio.Task[None]], None]:
        def forget(task: asyncio.Task[None]) -> None:
            del self._looking[name]
            if not task.cancelled():
                task.exception()

        return forget

    def _may_look(self, name: str) -> bool:
        if not self.is_on or not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING or not registry("lora_resolvers").names():
            return False
        return len(name) <= _LONGEST_NAME and name.isprintable()

    async def _look(self, name: str) -> None:
        """Ask the resolvers in order and load what the first of them finds that can be loaded."""
        base, reason = self._engine.model_config.model, None
        for resolver in registry("lora_resolvers").names():
            try:
                found = await registry("lora_resolvers").load(resolver).resolve_lora(base, name)
                if found is not None and not isinstance(found, LoRARequest):
                    raise TypeError(f"it answered with {type(found).__name__}, not with a LoRARequest or None")
            except Exception as error:
                logger.warning(
                    "LoRA resolver %r failed for %r: %s: %s", resolver, name[:200], type(error).__name__, error
                )
                continue
            if found is None:
                continue
            registry("lora_resolvers").note_use(resolver, "found an adapter")
            try:
                await self._load(name, found.lora_path, found.base_model_name)
                return
            except EngineDeadError:
                raise
            except HardpointError as error:
                logger.warning("adapter %r, found by %r, cannot be loaded: %s", name[:200], resolver, error)
                reason = reason or _told(error)
        if reason is not None:
            raise ApiError(f"The model `{name}` was found, but cannot be loaded: {reason}", param="model")


def _bad(message: str, param: str) -> ApiError:
    return ApiError(message, kind="InvalidUserInput", param=param)


def _told(error: HardpointError) -> str:
    """What a client is told: what is wrong and how to mend it, not where it lies on this machine."""
    return sanitise(without_origin(str(error)))
