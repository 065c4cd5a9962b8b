"""The methods of an engine that the engine core answers: one line each, with vLLM's signatures."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hardpoint.contracts.engine_client import EngineClient
from hardpoint.extensions.ledger import ledger
from hardpoint.types.lora_request import LoRARequest


class EngineCalls(EngineClient):
    """Calls by name. What the engine core cannot do comes back as NotImplementedError."""

    @abstractmethod
    async def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the engine core; raises the like of what it raised, or EngineDeadError."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a method of every worker; a list with one result per worker.

        timeout  seconds until TimeoutError; None waits without end
        """
        return await self._call("collective_rpc", method, timeout, tuple(args), kwargs, timeout_s=timeout)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False if running requests kept some."""
        return await self._call("reset_prefix_cache", reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """Drop cached media, here and in the engine."""
        media = getattr(getattr(self, "input_processor", None), "media", None)
        if media is not None:
            media.reset()
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        """Drop cached encoder outputs."""
        await self._call("reset_encoder_cache")

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin profiling on every worker. Raises ValueError unless --profiler-config names a profiler."""
        if delay_iterations is not None or max_iterations is not None:
            raise NotImplementedError("profiling by iterations is not supported by this version")
        await self._call("profile", True, profile_prefix)

    async def stop_profile(self) -> None:
        """End profiling."""
        await self._call("profile", False)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back. Raises NotImplementedError where the engine cannot."""
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`. Raises NotImplementedError where the engine cannot."""
        return await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine has given its memory back for a while."""
        return await self._call("is_sleeping")

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop generating: `abort` running requests, `wait` for them or `keep` them."""
        await self._call("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        """Undo `pause_generation`."""
        await self._call("resume_scheduler")

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return await self._call("is_scheduler_paused")

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Raises NotImplementedError where the engine cannot."""
        return await self._call("add_lora", lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter. Raises NotImplementedError where the engine cannot."""
        return await self._call("remove_lora", lora_id)

    async def list_loras(self) -> set[int]:
        """Ids of the loaded adapters."""
        return await self._call("list_loras")

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter resident. Raises NotImplementedError where the engine cannot."""
        return await self._call("pin_lora", lora_id)

    async def get_ledger(self) -> list[dict[str, Any]]:
        """The ledger of all processes, oldest entry first."""
        ledger.merge(await self._call("get_ledger"))
        return [entry.to_dict() for entry in sorted(ledger.entries(), key=lambda entry: entry.time)]

    async def checkpoint_prepare(self) -> None:
        """Refused: process snapshots are not supported by this version."""
        self._cannot("checkpoint_prepare")

    async def checkpoint_restore(self) -> None:
        """Refused: process snapshots are not supported by this version."""
        self._cannot("checkpoint_restore")
