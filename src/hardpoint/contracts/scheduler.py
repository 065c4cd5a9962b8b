"""Which requests run in the next step, and with how many tokens."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hardpoint.contracts.kv_cache import KVCacheConfig
from hardpoint.types.finish import RequestStatus
from hardpoint.types.messages import EngineCoreOutputs
from hardpoint.types.schedule import DraftTokenIds, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from hardpoint.types.stats import SchedulerStats

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig


class PauseState(enum.IntEnum):
    """What the scheduler leaves out."""

    UNPAUSED = 0
    PAUSED_NEW = 1  # waiting requests are not admitted, running ones go on
    PAUSED_ALL = 2  # nothing runs


class SchedulerInterface(ABC):
    """Plans every step; `--scheduler-cls` names another class.

    Built   once in the engine core, after the KV cache plan, with keywords only.
    Called  `schedule` before and `update_from_output` after each model step, by one thread. With async
            scheduling, or pipeline stages, `schedule` is called again before the results of the steps planned
            before are in; results come in the order of the plans. A plan may then hold no token at all.
    Fault   what it raises ends the engine core: its state cannot be trusted any more.

    A request is a `hardpoint.engine_core.request.Request`.
    """

    # Read by the engine core. None: no such part.
    connector: Any = None
    ec_connector: Any = None
    kv_cache_manager: Any = None

    @abstractmethod
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """Keep what is needed; `block_size` and `hash_block_size` are tokens."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether it can plan the token that follows one which is still being sampled.

        Without, `--async-scheduling` is refused with this class: there would be nothing to plan ahead.
        """
        return False

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Plan the next step. With `throttle_prefills` no waiting request is admitted."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step's result; return what is to be sent, by front end (`client_index`)."""

    @abstractmethod
    def add_request(self, request: Any) -> None:
        """Queue a request."""

    def why_impossible(self, request: Any) -> str | None:
        """Why a request could never run, in words for the client; None when it could. Asked before `add_request`."""
        return None

    @abstractmethod
    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Any]:
        """End requests from outside (None: all); ids that are not known are ignored. Return the ended ones."""

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """How many requests are waiting or running."""

    def has_unfinished_requests(self) -> bool:
        """Whether a request is waiting or running."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether the workers have yet to be told of ended requests."""

    def has_requests(self) -> bool:
        """Whether a step is needed."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""

    @property
    @abstractmethod
    def pause_state(self) -> PauseState:
        """What is left out at present."""

    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached blocks; False when running requests hold some and may not be preempted."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """A snapshot, or None when statistics are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """Release what is held."""

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens for grammar-bound requests of this step; None when there is none."""
        return None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:  # noqa: B027 - optional
        """Take the draft tokens for the next step."""

    def update_draft_token_ids_in_output(  # noqa: B027 - optional
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Take draft tokens into a step that is already planned."""

    def reset_encoder_cache(self) -> None:  # noqa: B027 - optional
        """Forget encoder outputs."""

    def get_kv_cache_usage(self) -> float:
        """Share of KV blocks in use, 0..1."""
        return 0.0

    def get_kv_connector(self) -> Any:
        """The KV connector's planning half, or None."""
        return self.connector

    def get_ec_connector(self) -> Any:
        """The encoder-cache connector's planning half, or None."""
        return self.ec_connector

    def get_kv_event_publisher_config(self) -> Any:
        """Where block events are published, or None."""
        return None
