"""Changing logits before a token is chosen: vLLM's two interfaces, side by side.

`LogitsProcessorV2` keeps its state per request slot, `LogitsProcessorV1` per row of the batch. Both come
through the group `vllm.logits_processors`, the flag `--logits-processors` and `LLM(logits_processors=[...])`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from hardpoint.errors import ConfigError
from hardpoint.extensions.groups import load_logits_processors, resolve_logits_processors

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hardpoint.config.sections import VllmConfig
    from hardpoint.types.sampling_params import SamplingParams

LOGITSPROCS_GROUP = "vllm.logits_processors"

T = TypeVar("T")


@dataclass(frozen=True)
class LogitsProcRequestState:
    """What the worker knows of every request, by slot. Read only.

    device         where the tensors live
    all_token_ids  .gpu [max_num_reqs, max_model_len] int32: prompt, then output
    prompt_len     .gpu [max_num_reqs] int32: tokens of the prompt
    prefill_len    .gpu [max_num_reqs] int32: tokens known when the request was (re)started
    total_len      .gpu [max_num_reqs] int32: tokens known now
    """

    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Any
    prompt_len: Any
    prefill_len: Any
    total_len: Any

    @classmethod
    def from_request_state(cls, req_states: Any) -> LogitsProcRequestState:
        """The view of a worker's request table."""
        names = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prompt_len", "prefill_len", "total_len")
        return cls(**{name: getattr(req_states, name) for name in names})


@dataclass(frozen=True)
class LogitsContext:
    """What the rows of one step's logits are. Only rows that get a token in this step are there.

    expanded_idx_mapping     [rows] int32: request slot of each row
    idx_mapping              [requests] int32: request slot of each request in the step
    idx_mapping_np           the same on the host
    expanded_local_pos       [rows] int32: place of the row among its request's drafts
    input_ids                [rows] int32: newest token before the one to be chosen
    pos                      [rows] int64: position of that token
    seq_lens_upper_bound_np  [requests] int32: tokens known, on the host
    """

    expanded_idx_mapping: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    pos: torch.Tensor
    seq_lens_upper_bound_np: np.ndarray


class LogitsProcessorV2(ABC):
    """Changes logits, with state per request slot (`vllm.v1.worker.gpu.sample.logits_processor`).

    Built   once in each worker when the model is loaded; the class is also loaded in the front end.
    Called  validate_params: in the front end for each request. In the worker: add_request when a request
            gets a slot, apply_staged_writes before each forward pass, apply after it when a request of the
            step uses the processor. A request keeps its slot, and so its state, through a preemption
            unless the slot is needed meanwhile; then add_request is called again.
    Blocks  nothing may: each call is inside a step.
    Fault   a ValueError of validate_params refuses the request (HTTP 400). What add_request or apply raise
            ends the requests that use the processor; the others go on.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:  # noqa: B027 - optional
        """Allocate state for `req_states.max_num_reqs` slots."""

    @classmethod  # noqa: B027 - optional
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for request arguments that are not acceptable."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Overwrite all state of slot `req_idx`; tell whether this request's logits are to be changed."""
        return True

    def remove_request(self, req_idx: int) -> None:  # noqa: B027 - optional
        """Drop what slot `req_idx` holds; its request has ended. Ours, absent in vLLM: optional."""

    def apply_staged_writes(self) -> None:  # noqa: B027 - optional
        """Bring state written since the last step to the device."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Change `logits` [rows, vocab] float32 in place or return another tensor of that shape.

        Rows of requests that do not use the processor are there too and must be left as they are.
        """


class MoveDirectionality(enum.Enum):
    """How a row of the batch moves."""

    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


RemovedRequest = int
# Row, parameters, prompt ids or None, live output ids: the worker appends to that list.
AddedRequest = tuple[int, "SamplingParams", "list[int] | None", "list[int]"]
# From row, to row, how.
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the rows of the batch changed since the last step; apply removed, then added, then moved.

    batch_size  rows after the update
    removed     rows freed and not taken again by `added`
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessorV1(ABC):
    """Changes logits, with state per row of the batch (`vllm.v1.sample.logits_processor`).

    The rows are the requests that get a token in this step: a request joins with its first token, leaves
    when it ends, waits or is preempted, and joins again with the output tokens it has.

    Built   once in each worker when the model is loaded; the class is also loaded in the front end.
    Called  validate_params: in the front end for each request. In the worker, each step: update_state
            with what changed (or None), then apply. is_argmax_invariant: once.
    Blocks  nothing may: each call is inside a step.
    Fault   a ValueError of validate_params refuses the request (HTTP 400). What apply or update_state
            raise ends the requests that use the processor, as far as that can be told: those with
            `extra_args`, else all of the step.
    """

    @classmethod  # noqa: B027 - optional
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for request arguments that are not acceptable."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change `logits` [rows, vocab] float32 in place or return another tensor of that shape."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the best token stays the best; then greedy batches are not passed."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch; None = they did not change."""
        raise NotImplementedError


RequestLogitsProcessor = Callable[..., Any]


class LogitsProcessorFault(Exception):
    """Raised from `apply` to say which rows of the logits are to blame; only their requests end."""

    def __init__(self, rows: Sequence[int], error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.rows = list(rows)


class LiveOutput(list[int]):
    """A request's output tokens: one list from its first token to its last.

    `kept` holds what a processor wants to find again when the request returns to the batch; it goes
    with the request.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        super().__init__(tokens)
        self.kept: dict[Any, Any] = {}


class AdapterLogitsProcessor(LogitsProcessorV1):
    """Builds a V1 processor from callables that handle one request each.

    A callable takes (output_ids, logits) or (prompt_ids, output_ids, logits) with `logits` [vocab] and
    returns the changed row. Its state stays with the request through moves and preemptions.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable for a request, or None to leave it alone."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self.req_info, batch_update, self._bind)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Hand each row to its callable; one that raises is the fault of its row alone."""
        for row, change in self.req_info.items():
            try:
                logits[row] = change(logits[row])
            except Exception as error:
                raise LogitsProcessorFault([row], error) from error
        return logits

    def _bind(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        kept = output_ids.kept if isinstance(output_ids, LiveOutput) else {}
        if self not in kept:
            kept[self] = self.new_req_logits_processor(params)
        call = kept[self]
        if call is None:
            return None
        # The prompt is passed to callables that have a place for it.
        known = (prompt_ids, output_ids) if len(signature(call).parameters) == 3 else (output_ids,)
        return lambda row: call(*known, row)


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep a dict row -> state in step with the batch; rows whose `new_state` is None have no entry.

    Returns whether anything changed.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        changed |= req_entries.pop(row, None) is not None or state is not None
        if state is not None:
            req_entries[row] = state
    for source, target, direction in batch_update.moved:
        moving, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        changed |= moving is not None or replaced is not None
        if moving is not None:
            req_entries[target] = moving
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return changed


def load_logits_processor_classes(vllm_config: VllmConfig) -> list[type[LogitsProcessorV1 | LogitsProcessorV2]]:
    """Every logits-processor class of an engine: installed plugins in order of discovery, then the config's list.

    Used where requests are checked and where they run. Raises what
    `load_logits_processors` and `resolve_logits_processors` raise; a pooling model takes none.
    """
    named = vllm_config.model_config.logits_processors
    if vllm_config.model_config.runner_type == "pooling":
        if named:
            raise ConfigError(
                "logits_processors is set, and a pooling model has no logits to process",
                code="logits-processors",
                fix="leave out --logits-processors",
            )
        return []
    return [*load_logits_processors(), *resolve_logits_processors(named)]
