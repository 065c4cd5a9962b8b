"""Sections about moving cache blocks and encoder outputs between engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hardpoint.config.sections.base import Options, Positive, Section

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
ECRole = Literal["ec_producer", "ec_consumer", "ec_both"]


@dataclass
class KVTransferConfig(Section):
    """A KV connector and its role."""

    kv_connector: str | None = None
    engine_id: str | None = None
    kv_buffer_device: str = "cpu"
    kv_role: KVRole | None = None
    kv_port: int = 14579
    kv_connector_extra_config: Options = field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Whether a connector is in use."""
        return self.kv_connector is not None and self.kv_role is not None

    @property
    def is_kv_producer(self) -> bool:
        """Whether this engine writes blocks out."""
        return self.kv_connector is not None and self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether this engine reads blocks in."""
        return self.kv_connector is not None and self.kv_role in ("kv_consumer", "kv_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """Return one of the connector's own options."""
        return self.kv_connector_extra_config.get(key, default)

    def has_connector(self, name: str) -> bool:
        """Whether the connector is called `name`."""
        return self.kv_connector == name


@dataclass
class KVEventsConfig(Section):
    """Publishing of cache block events."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Positive = 10_000
    hwm: Positive = 100_000
    max_queue_size: Positive = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.publisher is None:
            self.publisher = "zmq" if self.enable_kv_cache_events else "null"


@dataclass
class ECTransferConfig(Section):
    """An encoder-cache connector and its role."""

    ec_connector: str | None = None
    engine_id: str | None = None
    ec_buffer_device: str | None = "cuda"
    ec_buffer_size: float = 1e9
    ec_role: ECRole | None = None
    ec_ip: str = "127.0.0.1"
    ec_port: int = 14579
    ec_connector_extra_config: Options = field(default_factory=dict)
    ec_connector_module_path: str | None = None

    mm_encoder_output_widths: dict[str, int] = field(default_factory=dict, init=False)

    @property
    def is_ec_transfer_instance(self) -> bool:
        """Whether a connector is in use."""
        return self.ec_connector is not None and self.ec_role is not None

    @property
    def is_ec_producer(self) -> bool:
        """Whether this engine writes encoder outputs out."""
        return self.ec_connector is not None and self.ec_role in ("ec_producer", "ec_both")

    @property
    def is_ec_consumer(self) -> bool:
        """Whether this engine reads encoder outputs in."""
        return self.ec_connector is not None and self.ec_role in ("ec_consumer", "ec_both")

    @property
    def is_encode_only(self) -> bool:
        """Whether this engine runs encoders and nothing else."""
        return self.ec_role == "ec_producer"


@dataclass
class EncoderCacheManagerConfig(Section):
    """A custom encoder-cache manager class, by dotted name, and its options."""

    encoder_cache_manager_cls: str | None = None
    manager_config: Options = field(default_factory=dict)
