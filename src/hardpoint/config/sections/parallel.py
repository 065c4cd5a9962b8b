"""The parallel section: how many ranks there are and who runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from hardpoint.config.sections.base import NonNegative, Port, Positive, Processes, Section, derived

DataParallelBackend = Literal["mp", "ray"]
ExpertPlacementStrategy = Literal["linear", "round_robin"]


@dataclass
class EPLBConfig(Section):
    """Expert load balancing."""

    window_size: Positive = 1000
    step_interval: Positive = 3000
    num_redundant_experts: NonNegative = 0
    log_balancedness: bool = False
    use_async: bool = True
    policy: str = "default"
    communicator: str | None = None


@dataclass
class FaultToleranceConfig(Section):
    """Recovery from lost engines."""

    engine_recovery_timeout_sec: Positive = 120


@dataclass
class ParallelConfig(Section):
    """Ranks, their processes and their classes.

    distributed_executor_backend  uni, mp, ray, external_launcher, a dotted name or a class; None = chosen
    worker_cls                    dotted name of the worker class; "auto" = the platform's
    worker_extension_cls          dotted name of a mixin whose methods are added to the worker
    """

    pipeline_parallel_size: Processes = 1
    tensor_parallel_size: Processes = 1
    prefill_context_parallel_size: Positive = 1
    data_parallel_size: Processes = 1
    data_parallel_size_local: NonNegative = 1
    data_parallel_rank: NonNegative = 0
    data_parallel_rank_local: int | None = None
    data_parallel_master_ip: str = "127.0.0.1"
    data_parallel_rpc_port: Port = 29550
    data_parallel_master_port: int = 29500
    data_parallel_backend: DataParallelBackend = "mp"
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    is_moe_model: bool | None = None
    enable_expert_parallel: bool = False
    enable_ep_weight_filter: bool = False
    enable_eplb: bool = False
    eplb_config: EPLBConfig = field(default_factory=EPLBConfig)
    expert_placement_strategy: ExpertPlacementStrategy = "linear"
    all2all_backend: str = "allgather_reducescatter"
    max_parallel_loading_workers: Positive | None = None
    disable_custom_all_reduce: bool = False
    enable_shm_tensor_arena: bool = False
    enable_elastic_ep: bool = False
    enable_dbo: bool = False
    ubatch_size: NonNegative = 0
    ray_runtime_env: Any = None
    placement_group: Any = None
    distributed_executor_backend: Any = None
    worker_cls: str = "auto"
    worker_extension_cls: str = ""
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    node_rank: NonNegative = 0
    nnodes: Positive = 1
    numa_bind: bool = False
    numa_bind_nodes: list[int] | None = None
    numa_bind_cpus: list[str] | None = None
    assigned_physical_gpu_ids: list[int] | None = None
    distributed_timeout_seconds: Positive | None = None
    cpu_distributed_timeout_seconds: Positive | None = None
    rank: int = 0
    decode_context_parallel_size: Positive = 1
    cp_kv_cache_interleave_size: Positive = 1
    dp_sync_interval: Positive = 16
    enable_fault_tolerance: bool = False
    fault_tolerance_config: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    ray_workers_use_nsight: bool = False

    world_size: Annotated[int, msgspec.Meta(ge=1)] = derived(1)
    data_parallel_index: int = derived(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.world_size = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        self.data_parallel_index = self.data_parallel_rank

    @property
    def world_size_across_dp(self) -> int:
        """Ranks of all data-parallel replicas together."""
        return self.world_size * self.data_parallel_size

    @property
    def local_world_size(self) -> int:
        """Ranks of one replica on this node."""
        return self.world_size // self.nnodes_within_dp

    @property
    def nnodes_within_dp(self) -> int:
        """Nodes that one replica spans."""
        return max(1, self.nnodes // max(1, self.data_parallel_size))

    @property
    def node_rank_within_dp(self) -> int:
        """Index of this node among those of its replica."""
        return self.node_rank % self.nnodes_within_dp

    @property
    def use_ray(self) -> bool:
        """Whether Ray runs the workers."""
        backend = self.distributed_executor_backend
        return backend == "ray" or (isinstance(backend, type) and bool(getattr(backend, "uses_ray", False)))

    @property
    def use_sequence_parallel_moe(self) -> bool:
        """Whether experts get a part of the tokens each: never."""
        return False

    @property
    def use_ubatching(self) -> bool:
        """Whether a step is cut into micro-batches."""
        return self.enable_dbo or self.ubatch_size > 1

    @property
    def local_engines_only(self) -> bool:
        """Whether this front end talks to engines of its own node only."""
        return self.data_parallel_external_lb or self.data_parallel_hybrid_lb

    @property
    def cpu_distributed_timeout(self) -> int | None:
        """Seconds a CPU process group may wait."""
        return self.cpu_distributed_timeout_seconds or self.distributed_timeout_seconds
