"""Several replicas of the model: an engine core each, one client over all of them.

A request goes to the least busy replica, or to the one it names; its abort follows it. Calls go to all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hardpoint.config.sections import VllmConfig
from hardpoint.errors import EngineDeadError
from hardpoint.front_end.client import AsyncEngineCoreClient
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.engine_process import EngineProcess, preload_for
from hardpoint.types.messages import EngineCoreOutputs, EngineCoreRequest, Ready

_TOLD_LATELY_S = 2.0
# Calls whose results are lists with one entry per worker, or per event.
_JOINED = frozenset({"collective_rpc", "apply_model", "get_ledger"})


def engine_of(engine_args: Any) -> EngineHandle:
    """The engine core of these engine arguments, or its replicas: processes that wait for their configuration."""
    size = engine_args.data_parallel_size
    preload = preload_for(engine_args)
    if size == 1:
        return EngineProcess(preload)
    return EngineReplicas.start(size, preload)


class EngineReplicas(EngineHandle):
    """All replicas as one engine: it is ready when each is, and dies with the first that does."""

    address = ""

    def __init__(self, replicas: Sequence[EngineHandle]) -> None:
        super().__init__()
        self.replicas = list(replicas)

    @classmethod
    def start(cls, size: int, preload: Sequence[str] = ()) -> EngineReplicas:
        """Start `size` processes; none is left when one cannot be started."""
        replicas: list[EngineProcess] = []
        try:
            for index in range(size):
                replicas.append(EngineProcess(preload, index))
        except BaseException:
            for replica in replicas:
                replica.abandon()
            raise
        return cls(replicas)

    def begin(self, vllm_config: VllmConfig, executor_class: type | None = None, log_stats: bool = True) -> None:
        """Send each the configuration; it knows its own rank."""
        for replica in self.replicas:
            replica.begin(vllm_config, executor_class, log_stats)

    def wait_ready(self) -> Ready:
        """Wait until each can serve, and tell what holds for all. Raises what stopped the first that failed."""
        ready = [replica.wait_ready() for replica in self.replicas]
        for replica in self.replicas:
            replica.on_death(self._lost)
        return merged(ready)

    def connected(self) -> None:
        """Everybody is connected."""
        for replica in self.replicas:
            replica.connected()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End all at the same time."""
        self._stop()
        with ThreadPoolExecutor(len(self.replicas), thread_name_prefix="end replica") as threads:
            list(threads.map(lambda replica: replica.shutdown(timeout_s), self.replicas))

    def abandon(self) -> None:
        """End all at once."""
        self.stopped = True
        for replica in self.replicas:
            replica.abandon()

    def _lost(self, error: EngineDeadError) -> None:
        """Called from the thread that watches a replica."""
        self.fail(error)


def merged(ready: Sequence[Ready]) -> Ready:
    """What a front end may rely on, whichever replica a request goes to."""
    first = ready[0]
    return Ready(
        engine_index=first.engine_index,
        num_gpu_blocks=min(one.num_gpu_blocks for one in ready),
        kv_cache_size_tokens=min(one.kv_cache_size_tokens for one in ready),
        max_model_len=min(one.max_model_len for one in ready),
        block_size=first.block_size,
        supported_tasks=first.supported_tasks,
        ledger=[entry for one in ready for entry in one.ledger],
    )


class _Load:
    """How busy one replica is.

    own     our requests there
    others  requests of other front ends, as the replica last told
    """

    def __init__(self) -> None:
        self.own = 0
        self.others = 0
        self.told = 0.0
        self.last_given = 0.0

    def note(self, requests: int) -> None:
        """Take in how many requests the replica has."""
        self.others = max(0, requests - self.own)
        self.told = time.monotonic()

    @property
    def rank(self) -> tuple[int, float]:
        """The least one gets the next request; of equal ones the one that has waited longest for it."""
        # A replica tells one front end only in each step: what it told us may long be over.
        others = self.others if time.monotonic() - self.told < _TOLD_LATELY_S else 0
        return (self.own + others, self.last_given)


class ReplicaClient:
    """The replicas for a front end that runs on an event loop; the methods are `AsyncEngineCoreClient`'s."""

    def __init__(self, process: EngineReplicas, client_index: int = 0) -> None:
        self.process = process
        self._outputs: asyncio.Queue[EngineCoreOutputs | BaseException] = asyncio.Queue()
        self._clients = [AsyncEngineCoreClient(one, client_index, self._outputs) for one in process.replicas]
        self._loads = [_Load() for _ in self._clients]
        # Request id -> the replica that has it.
        self._places: dict[str, int] = {}

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why an engine core has ended; None while all run."""
        return self.process.error

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send one request to the replica it names, else to the least busy one."""
        place = request.data_parallel_rank
        if place is None:
            place = min(range(len(self._loads)), key=lambda index: self._loads[index].rank)
        load = self._loads[place]
        load.last_given = time.monotonic()
        load.own += 1
        self._places[request.request_id] = place
        try:
            await self._clients[place].add_request_async(request)
        except BaseException:
            self._forget(request.request_id)
            raise

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Stop requests where they run."""
        by_place: dict[int, list[str]] = {}
        for request_id in request_ids:
            place = self._forget(request_id)
            if place is not None:
                by_place.setdefault(place, []).append(request_id)
        for place, ids in by_place.items():
            await self._clients[place].abort_requests_async(ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Wait for what the next step of any replica made. Raises EngineDeadError."""
        for client in self._clients:
            client.start()
        outputs = await self._outputs.get()
        if isinstance(outputs, BaseException):
            raise outputs
        for output in outputs.outputs:
            if output.finished:
                self._forget(output.request_id)
        if outputs.scheduler_stats is not None:
            stats = outputs.scheduler_stats
            self._loads[outputs.engine_index].note(stats.num_running_reqs + stats.num_waiting_reqs)
        return outputs

    async def call_utility_async(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method of every engine core and return one result for all; raises the first's error.

        Lists with an entry per worker are joined, in the order of the replicas; a yes needs all to say so;
        counts add up; else the first's result counts.
        """
        calls = [client.call_utility_async(method, *args, timeout_s=timeout_s, **kwargs) for client in self._clients]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return _one_result(method, results)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End the engine cores and close the connections; a second time does nothing."""
        self.process.shutdown(timeout_s)
        for client in self._clients:
            client.shutdown(timeout_s)

    def _forget(self, request_id: str) -> int | None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._loads[place].own -= 1
        return place


def _one_result(method: str, results: Sequence[Any]) -> Any:
    if method in _JOINED:
        return [entry for result in results for entry in result]
    if all(isinstance(result, bool) for result in results):
        return all(results)
    if method == "get_request_counts":
        return tuple(sum(counts) for counts in zip(*results, strict=True))
    return results[0]


EngineClientCore = AsyncEngineCoreClient | ReplicaClient


def connect(process: EngineHandle, client_index: int = 0) -> EngineClientCore:
    """A client for an engine that is ready."""
    if isinstance(process, EngineReplicas):
        return ReplicaClient(process, client_index)
    return AsyncEngineCoreClient(process, client_index)
