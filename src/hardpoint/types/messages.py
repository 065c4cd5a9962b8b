"""Every message that crosses a process line. The comment names sender and receiver."""

from __future__ import annotations

import enum
import time
from typing import Any

import msgspec

from hardpoint.types.finish import FinishReason
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.multimodal import MultiModalFeatureSpec
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.stats import PrefillStats, SchedulerStats


class EngineCoreRequestType(enum.Enum):
    """First frame of a front end -> engine core message."""

    ADD = b"\x00"  # EngineCoreRequest
    ABORT = b"\x01"  # list[str] of request ids
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"  # UtilityCall
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"


class EngineCoreEventType(enum.IntEnum):
    """Moments in a request's life that the engine core reports."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """One moment; `timestamp` is `time.monotonic()` of the engine core."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(cls, kind: EngineCoreEventType, timestamp: float | None = None) -> EngineCoreEvent:
        """An event stamped now unless told otherwise."""
        return cls(kind, time.monotonic() if timestamp is None else timestamp)


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # front end -> engine core
    """One sequence to run. A request with n > 1 is n of these with ids of their own."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: Any = None

    @property
    def params(self) -> SamplingParams | PoolingParams:
        """The parameters, whichever kind the request has."""
        params = self.sampling_params or self.pooling_params
        assert params is not None
        return params


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # engine core -> front end
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    # Host arrays: nothing on a device crosses a process. Row i scores prompt token i + 1.
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: Any = None
    spec_decode_metrics: Any = None
    prompt_token_id_logprobs: Any = None
    # Why a request ended with FinishReason.ERROR, in words for the client.
    error: str | None = None
    # The parameter that was not acceptable, when that is the reason: the client's mistake, not ours.
    refused_parameter: str | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class UtilityCall(msgspec.Struct, array_like=True, gc=False):  # front end -> engine core
    """Call a method of the engine core by name; answered with `UtilityOutput`.

    A function argument is a cloudpickled `bytes` tagged by the caller and is refused
    unless VLLM_ALLOW_INSECURE_SERIALIZATION is set.
    """

    call_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):  # engine core -> front end
    """Answer to a `UtilityCall`."""

    call_id: int
    failure_message: str | None = None
    result: Any = None
    # Class name of what was raised, so that the caller can raise its like.
    failure_type: str | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # engine core -> front end
    """Everything one step has for one front end. `timestamp` is monotonic, set on creation.

    is_last  the engine core has failed: nothing comes after this
    """

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None
    is_last: bool = False

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class ChildStart(msgspec.Struct):  # parent -> child, before the child loads anything
    """Where the parent finds modules, so that the child finds the same."""

    sys_path: list[str]


class Hello(msgspec.Struct, omit_defaults=True, tag=True):  # child -> parent, first message
    """A child is up and has booted its role."""

    pid: int
    role: str
    index: int = 0


class EngineCoreStart(msgspec.Struct, omit_defaults=True):  # front end -> engine core, answer to Hello
    """What an engine core needs to begin.

    config          a `VllmConfig` as `config.wire` encodes it
    address         where to bind its socket
    executor_class  reference of an executor class given by the caller; None: by the config
    environ         variables changed since the child was started; None removes one
    """

    config: bytes
    address: str
    executor_class: str | None = None
    log_stats: bool = True
    environ: dict[str, str | None] = {}


class WorkerStart(msgspec.Struct, omit_defaults=True):  # engine core -> worker, answer to Hello
    """What a worker of the `mp` executor needs to begin."""

    config: bytes
    rank: int = 0
    local_rank: int = 0
    distributed_init_method: str = ""
    is_driver_worker: bool = False


class ApiServerStart(msgspec.Struct, omit_defaults=True):  # launcher -> API server, answer to Hello
    """What one of several API servers needs to begin. A `Ready` follows, and a `StartFailed` when the engine ends.

    args       `serve`'s parsed flags by name, in the form of `links.codec.pack`
    where      what the shared socket listens on, for people
    addresses  the sockets of the engine cores, by rank
    """

    args: bytes
    where: str
    addresses: list[str]
    client_count: int
    ledger: list[dict[str, Any]] = []
    environ: dict[str, str | None] = {}


class Inspect(msgspec.Struct):  # front end -> inspector, answer to Hello
    """The model class to look at, as "module:Class"."""

    ref: str


class Inspected(msgspec.Struct, omit_defaults=True, tag=True):  # inspector -> front end
    """What a model class is and declares.

    info     the fields of `ModelInfo`
    path     "module:Class" where it is defined
    remarks  what it lacks, in words
    sources  path -> digest of the files that all this depends on
    """

    info: dict[str, Any]
    path: str = ""
    remarks: list[str] = []
    sources: dict[str, str] = {}
    ledger: list[dict[str, Any]] = []


class TokenTable(msgspec.Struct):  # engine core -> grammar compiler, in GrammarCompilerStart
    """The bytes of every token; none for special tokens and for ids without a token."""

    pieces: list[bytes]
    special_ids: list[int]
    eos_token_id: int | None


class GrammarCompilerStart(msgspec.Struct):  # engine core -> grammar compiler, answer to Hello
    """What a grammar compiler needs to begin; `config` is a `VllmConfig` as `config.wire` encodes it."""

    config: bytes
    table: TokenTable


class GrammarJob(msgspec.Struct, array_like=True):  # engine core -> grammar compiler
    """A constraint to compile on trial.

    kind   name of a `StructuredOutputOptions`
    style  fields of a `JsonStyle`; None: nothing is asked
    ref    where a plugin's backend is, should the plugins of the process not register it; for such a backend
           they are loaded first
    """

    backend: str
    kind: str
    spec: str
    stop_token_ids: list[int]
    style: dict[str, Any] | None = None
    ref: str = ""


class GrammarVerdict(msgspec.Struct, array_like=True, omit_defaults=True):  # grammar compiler -> engine core
    """How a job stands.

    stage  ready (the backend is loaded and compiles now), done, refused (this backend cannot keep the
           constraint), malformed (none could) or failed (the backend is at fault)
    """

    stage: str
    reason: str = ""
    dump: bytes | None = None


class WorkerCall(msgspec.Struct, array_like=True, omit_defaults=True):  # engine core -> worker
    """Call a method of the worker; `method` is a name or a function; answered with `UtilityOutput`.

    Values are in the form of `links.codec.tagged`. Past `timeout_s` the worker answers with a
    TimeoutError and goes on to its next call. With `silent` the result stays where it is.
    """

    call_id: int
    method: Any
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout_s: float | None = None
    silent: bool = False


class Ready(msgspec.Struct, omit_defaults=True, tag=True):  # engine core -> front end, once the model can serve
    """What the front end must know of a started engine core."""

    engine_index: int = 0
    num_gpu_blocks: int = 0
    kv_cache_size_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 0
    supported_tasks: list[str] = []
    # Ledger entries of the engine core and its workers, as plain dicts.
    ledger: list[dict[str, Any]] = []


class StartFailed(msgspec.Struct, omit_defaults=True, tag=True):  # child -> parent, instead of Ready
    """Why a child could not start, in the parts of a coded error."""

    code: str
    what: str
    origin: str = ""
    fix: str = ""
    traceback: str = ""
    # Class name of the error, so that the parent can raise its like.
    kind: str = ""
