"""An actor per worker on a running Ray cluster: the way to several machines."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from hardpoint.config.wire import from_wire, to_wire
from hardpoint.contracts.worker import WorkerWrapperBase
from hardpoint.engine_core.executors.remote import RemoteExecutor
from hardpoint.env import envs
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.extensions.refs import load_ref
from hardpoint.links.worker_link import answer_call, encode_call, read_answer
from hardpoint.log import configure, init_logger
from hardpoint.types.messages import WorkerStart

logger = init_logger(__name__)
# Not imported: an import would choose the platform before the process has booted.
_PLATFORM = "hardpoint.platforms:current_platform"
_PLACING_S = 60.0
# What the workers must know of our environment, besides what the platform names.
_PREFIXES = ("VLLM_", "HARDPOINT_", "HF_", "GLOO_", "NCCL_")
# Marks processes that end with this server; Ray ends its own.
_NOT_OURS = ("HARDPOINT_RUN_ID",)


class RayWorker:
    """One rank, as a Ray actor. Calls come and go in the form of `links.worker_link`."""

    def __init__(self) -> None:
        self._wrapper: WorkerWrapperBase | None = None
        self._ended = threading.Event()

    def place(self) -> tuple[str, str]:
        """The node this actor is on, and the node's address."""
        ray = _ray()
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def free_address(self, host: str) -> str:
        """An address on this node where the ranks can meet."""
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def start(self, message: bytes) -> None:
        """Build the worker of this rank."""
        start = msgspec.msgpack.decode(message, type=WorkerStart)
        configure(f"worker {start.rank}" if start.rank else "worker")
        self._wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=start.rank)
        arguments = {
            "vllm_config": from_wire(start.config),
            "local_rank": start.local_rank,
            "rank": start.rank,
            "distributed_init_method": start.distributed_init_method,
            "is_driver_worker": start.is_driver_worker,
        }
        self._wrapper.init_worker([arguments])

    def call(self, frame: bytes) -> bytes:
        """Answer one call of the engine core."""
        return answer_call(frame, self._wrapper)

    def wait_for_end(self) -> None:
        """Return never: that this call fails is how the engine core hears of our end."""
        self._ended.wait()


class RayExecutor(RemoteExecutor):
    """Starts an actor per rank in a placement group of the cluster that RAY_ADDRESS, or this machine, is part of."""

    uses_ray = True

    def _init_executor(self) -> None:
        self._ray = _ray()
        self._actors: list[Any] = []
        self._group: Any = None
        self._connected = False
        # Ray's futures call back on a thread of its own that must not be kept busy.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="answers of ray workers")
        super()._init_executor()

    def _start_workers(self) -> None:
        self._connect()
        self._place()
        for rank in range(self.parallel_config.world_size):
            self._actors.append(self._make_actor(rank))
        places = self._ray.get([actor.place.remote() for actor in self._actors])
        host = envs.VLLM_HOST_IP or places[0][1]
        address = self._ray.get(self._actors[0].free_address.remote(host))
        starts = self._starts([node for node, _ in places], address)
        started = [
            actor.start.remote(msgspec.msgpack.encode(start)) for actor, start in zip(self._actors, starts, strict=True)
        ]
        threading.Thread(target=self._watch, name="watch ray workers", daemon=True).start()
        self._ray.get(started)

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        try:
            self._ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), logging_level="warning")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster can be reached: {error}",
                code="ray-cluster",
                origin="RAY_ADDRESS" if "RAY_ADDRESS" in os.environ else "--distributed-executor-backend ray",
                fix="start one with `ray start --head` (and `ray start --address` on the other machines), or set "
                "RAY_ADDRESS",
            ) from error
        self._connected = True

    def _place(self) -> None:
        """Reserve the places of all ranks; whatever stops this start gives them back with the workers."""
        bundle = self._bundle()
        self._group = self._ray.util.placement_group([bundle] * self.parallel_config.world_size, strategy="PACK")
        if not self._group.wait(_PLACING_S):
            there = {name: amount for name, amount in self._ray.cluster_resources().items() if name in bundle}
            raise ConfigError(
                f"Ray has no room for {self.parallel_config.world_size} workers of {bundle}; it has {there}",
                code="ray-resources",
                fix="add nodes, or ask for fewer ranks (--cpu-threads sets how many CPUs a rank takes)",
            )

    def _bundle(self) -> dict[str, float]:
        """What one rank takes: a device, or the processors that it computes on."""
        key = load_ref(_PLATFORM).ray_device_key
        return {key: 1.0} if key else {"CPU": float(self.vllm_config.device_config.cpu_threads or 1)}

    def _make_actor(self, rank: int) -> Any:
        bundle = self._bundle()
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank
        )
        # One thread takes the calls, in order; another one only waits for the end.
        actor_class = self._ray.remote(concurrency_groups={"watch": 1})(RayWorker)
        return actor_class.options(
            num_cpus=bundle.get("CPU", 0.0),
            num_gpus=bundle.get("GPU", 0.0),
            resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=strategy,
            runtime_env={"env_vars": _environment()},
        ).remote()

    def _starts(self, nodes: Sequence[str], address: str) -> list[WorkerStart]:
        config, seen, starts = to_wire(self.vllm_config), Counter[str](), []
        for rank, node in enumerate(nodes):
            starts.append(
                WorkerStart(
                    config=config,
                    rank=rank,
                    local_rank=seen[node],
                    distributed_init_method=address,
                    is_driver_worker=rank % self.parallel_config.tensor_parallel_size == 0,
                )
            )
            seen[node] += 1
        return starts

    def _watch(self) -> None:
        ends = {
            actor.wait_for_end.options(concurrency_group="watch").remote(): rank
            for rank, actor in enumerate(self._actors)
        }
        done: list[Any] = []
        try:
            done, _ = self._ray.wait(list(ends), num_returns=1)
            self._ray.get(done[0])
        except Exception as error:
            if not done:
                return  # We have let go of the cluster.
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._worker_ended(f"worker {ends[done[0]]} on Ray has ended: {cause}")

    def _send(
        self,
        rank: int,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        silent: bool,
    ) -> Future[Any]:
        frame = encode_call(method, args, kwargs, timeout, silent=silent)
        answer: Future[Any] = Future()
        self._actors[rank].call.remote(frame).future().add_done_callback(
            lambda done: self._threads.submit(_settle, answer, done, rank)
        )
        return answer

    def _end_workers(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
        if self._connected:
            self._ray.shutdown()
        self._threads.shutdown(wait=False)


def _settle(answer: Future[Any], done: Any, rank: int) -> None:
    try:
        answer.set_result(read_answer(done.result(), f"worker {rank}"))
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "ray":
            error = EngineDeadError(f"worker {rank} on Ray has ended", code="worker-died")
        answer.set_exception(error)


def _ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigError(
            f"the ray executor needs the package ray: {error}",
            code="ray-missing",
            origin="--distributed-executor-backend ray",
            fix="pip install 'hardpoint[ray]'",
        ) from error
    return ray


def _environment() -> dict[str, str]:
    """The variables of ours that workers on other machines need."""
    named = set(load_ref(_PLATFORM).additional_env_vars)
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(_PREFIXES) and name not in _NOT_OURS) or name in named
    }
