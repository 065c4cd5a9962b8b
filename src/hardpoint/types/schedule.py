"""What the engine core tells workers to do in one step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.multimodal import MultiModalFeatureSpec
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams


@dataclass
class NewRequestData:  # engine core -> worker
    """A request the worker has not seen yet."""

    req_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec]
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: LoRARequest | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    # Prompt plus what was generated so far: more than the prompt after a preemption.
    prefill_token_ids: list[int] | None = None
    replay_start: int = 0

    @property
    def prompt_len(self) -> int:
        """Prompt length in tokens."""
        return len(self.prompt_token_ids or ())


@dataclass
class CachedRequestData:  # engine core -> worker
    """Deltas for requests the worker already holds; lists are parallel to `req_ids`."""

    req_ids: list[str]
    # Came back after a preemption: their block ids replace instead of extend.
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @property
    def num_reqs(self) -> int:
        """How many requests are described."""
        return len(self.req_ids)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No request at all."""
        return cls([], set(), [], {}, [], [], [])


@dataclass
class SchedulerOutput:  # engine core -> worker
    """One step's plan."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    scheduled_encoder_inputs: dict[str, list[int]]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    scheduled_encoder_input_stats: Any = None
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: Any = None
    has_sync_kv_loads: bool = False
    aux_output_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    ec_manager_metadata: Any = None
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[Any] | None = None
    kv_connector_block_state: Any = None
    num_spec_tokens_to_schedule: int = 0
    num_common_prefix_blocks: list[int] = field(default_factory=list)

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """A step that computes nothing."""
        return cls([], CachedRequestData.make_empty(), {}, 0, {}, {}, set(), [])


class GrammarOutput(NamedTuple):  # engine core -> worker
    """Allowed-token bit rows (int32 over the vocabulary) for grammar-bound requests."""

    structured_output_request_ids: list[str]
    grammar_bitmask: Any
    num_acceptable_drafts: list[int] | None = None


# The reason of a request whose every next token is forbidden.
NO_TOKEN_LEFT = "no token is left to choose: grammar, allowed ids, bad words or logits processors exclude all"


@dataclass
class ModelRunnerOutput:  # worker -> engine core
    """What one step produced; lists are parallel to `req_ids`."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    # Empty list: no token for that request in this step (a prefill chunk).
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    # One row per sampled token, in the order of `sampled_token_ids` flattened.
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists | None] = field(default_factory=dict)
    prompt_token_id_logprobs_dict: dict[str, Any] = field(default_factory=dict)
    pooler_output: list[Any] | None = None
    kv_connector_output: Any = None
    ec_connector_output: Any = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None
    aux_output_connector_output: Any = None
    sampling_masks: Any = None
    # Requests that failed alone (NaN logits, a raising logits processor): id -> reason.
    request_errors: dict[str, str] = field(default_factory=dict)


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput([], {})


class AsyncModelRunnerOutput:
    """A step still running on the device; `get_output` blocks until it is done."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait and return the step's result."""
        raise NotImplementedError


@dataclass
class DraftTokenIds:  # worker -> engine core
    """Draft tokens per request for the next step."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]
