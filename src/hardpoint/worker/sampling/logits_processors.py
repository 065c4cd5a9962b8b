"""Hosts the custom logits processors of a worker: both interfaces, each kept from harming the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.contracts.logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsContext,
    LogitsProcessorFault,
    LogitsProcessorV1,
    LogitsProcessorV2,
    LogitsProcRequestState,
)
from hardpoint.errors import PluginError
from hardpoint.extensions.boot import owner_of
from hardpoint.extensions.faults import note_fault
from hardpoint.extensions.groups import origin_label
from hardpoint.log import init_logger
from hardpoint.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig
    from hardpoint.worker.sampling.metadata import SamplingMetadata

logger = init_logger(__name__)


class ProcessorFault(Exception):
    """A processor raised inside a step; the requests of `rows` end with `reason`, the others are sampled again."""

    def __init__(self, rows: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.rows = list(rows)
        self.reason = reason


class LogitsProcessors:
    """The custom processors of one worker, in the order they apply.

    classes     as `load_logits_processor_classes` gives them
    req_states  the slots, for slot-keyed (V2) processors
    Raises PluginError naming the class whose construction fails.
    """

    def __init__(
        self,
        classes: Sequence[type[LogitsProcessorV1 | LogitsProcessorV2]],
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: LogitsProcRequestState,
    ) -> None:
        self._hosts: list[_RowHost | _SlotHost] = []
        for kind in classes:
            if issubclass(kind, LogitsProcessorV2):
                self._hosts.append(_SlotHost(kind, vllm_config, req_states))
            else:
                self._hosts.append(_RowHost(kind, vllm_config, device))
        self._slot_hosts = [host for host in self._hosts if isinstance(host, _SlotHost)]
        self._row_hosts = [host for host in self._hosts if isinstance(host, _RowHost)]
        self._late = [host for host in self._row_hosts if host.argmax_invariant]
        self._early = [host for host in self._hosts if host not in self._late]

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def follows_rows(self) -> bool:
        """Whether a row-keyed (V1) processor must be told how rows move."""
        return bool(self._row_hosts)

    @property
    def has_argmax_invariant(self) -> bool:
        """Whether a processor applies after the temperature, to batches that are not all greedy."""
        return bool(self._late)

    def add_request(self, slot: int, params: SamplingParams) -> str:
        """Tell the slot-keyed processors of a request; returns why it must end, or nothing."""
        reasons = [host.add(slot, params) for host in self._slot_hosts]
        return next(filter(None, reasons), "")

    def remove_request(self, slot: int) -> None:
        """Tell the slot-keyed processors that a slot is free."""
        for host in self._slot_hosts:
            host.remove(slot)

    def apply_staged_writes(self) -> dict[int, str]:
        """Start a step; returns slot -> why its request must end."""
        failed: dict[int, str] = {}
        for host in self._slot_hosts:
            failed.update(host.apply_staged_writes())
        return failed

    def follow_rows(self, update: BatchUpdate | None, rows: Callable[[], Sequence[AddedRequest]]) -> dict[int, str]:
        """Tell the row-keyed processors what changed.

        update  the changes           rows  gives all rows as they are now
        Returns row -> why its request must end; when there is any, take these rows out and call again.
        """
        failed: dict[int, str] = {}
        for host in self._row_hosts:
            failed.update(host.follow(update, rows))
        return failed

    def applies(self, metadata: SamplingMetadata) -> bool:
        """Whether a processor has to see these rows before the temperature."""
        return any(host.uses(metadata) for host in self._early)

    def apply(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Pass the logits through; raises ProcessorFault."""
        for host in self._early:
            if host.uses(metadata):
                logits = host.apply(logits, metadata)
        return logits

    def apply_argmax_invariant(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Pass the tempered logits through those processors that keep the best token; raises ProcessorFault."""
        for host in self._late:
            logits = host.apply(logits, metadata)
        return logits


class _Host:
    """One processor and what to do when it raises."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        origin = origin_label(kind)
        self.name = f"{kind.__module__}.{kind.__qualname__}" + (f" ({origin})" if origin else "")

    def _build(self, *args: Any) -> Any:
        try:
            return self._kind(*args)
        except Exception as error:
            raise PluginError(
                f"logits processor {self.name} cannot be built: {type(error).__name__}: {error}",
                code="logits-processor-build",
                origin=self.name,
                fix="mend or leave out the processor",
            ) from error

    def _failed(self, doing: str, error: BaseException) -> str:
        """Log what went wrong, with its traceback; returns it in words for the client."""
        reason = f"logits processor {self.name} failed in {doing}: {type(error).__name__}: {error}"
        logger.error("%s; the requests that use it end, the others go on", reason, exc_info=error)
        owner = owner_of(self._kind)
        note_fault("logits_processors", self._kind.__qualname__, reason, owner.origin if owner is not None else None)
        return reason

    def _checked(self, changed: Any, before: Tensor) -> Tensor:
        if not isinstance(changed, Tensor) or changed.shape != before.shape:
            got = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise TypeError(f"apply must return a tensor of shape {tuple(before.shape)}, got {got}")
        return changed.to(torch.float32)


class _SlotHost(_Host):
    """A V2 processor."""

    def __init__(
        self, kind: type[LogitsProcessorV2], vllm_config: VllmConfig, req_states: LogitsProcRequestState
    ) -> None:
        super().__init__(kind)
        self._processor: LogitsProcessorV2 = self._build(vllm_config, req_states)
        self._active = np.zeros(req_states.max_num_reqs, np.bool_)

    def add(self, slot: int, params: SamplingParams) -> str:
        self._active[slot] = False
        try:
            used = self._processor.add_request(slot, params)
        except Exception as error:
            return self._failed("add_request", error)
        if used is None:
            logger.warning_once(
                "logits processor %s: add_request returned None, taken as True; return a bool", self.name
            )
            used = True
        self._active[slot] = bool(used)
        return ""

    def remove(self, slot: int) -> None:
        self._active[slot] = False
        try:
            self._processor.remove_request(slot)
        except Exception as error:
            self._failed("remove_request", error)

    def apply_staged_writes(self) -> dict[int, str]:
        try:
            self._processor.apply_staged_writes()
        except Exception as error:
            reason = self._failed("apply_staged_writes", error)
            return dict.fromkeys(np.flatnonzero(self._active).tolist(), reason)
        return {}

    def uses(self, metadata: SamplingMetadata) -> bool:
        return bool(self._active[metadata.slots].any())

    def apply(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        try:
            return self._checked(self._processor.apply(logits, metadata.context()), logits)
        except LogitsProcessorFault as fault:
            raise ProcessorFault(fault.rows, self._failed("apply", fault)) from fault
        except Exception as error:
            users = np.flatnonzero(self._active[metadata.slots]).tolist()
            raise ProcessorFault(users, self._failed("apply", error)) from error


class _RowHost(_Host):
    """A V1 processor. After it raised while following rows, a new one is built and told of all rows."""

    def __init__(self, kind: type[LogitsProcessorV1], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kind)
        self._arguments = (vllm_config, device, False)
        self._processor: LogitsProcessorV1 = self._build(*self._arguments)
        self.argmax_invariant = bool(self._processor.is_argmax_invariant())
        self._lost_track = False

    def uses(self, metadata: SamplingMetadata) -> bool:
        return True

    def follow(self, update: BatchUpdate | None, rows: Callable[[], Sequence[AddedRequest]]) -> dict[int, str]:
        if not self._lost_track:
            try:
                self._processor.update_state(update)
                return {}
            except Exception as error:
                self._failed("update_state", error)
                self._lost_track = True
        return self._start_over(rows())

    def _start_over(self, rows: Sequence[AddedRequest]) -> dict[int, str]:
        """Add row after row to a new processor; the first that raises must go."""
        try:
            self._processor = self._build(*self._arguments)
        except PluginError as error:
            return {row: error.what for row, *_ in rows}
        for entry in rows:
            try:
                self._processor.update_state(BatchUpdate(entry[0] + 1, [], [entry], []))
            except Exception as error:
                return {entry[0]: self._failed("update_state", error)}
        self._lost_track = False
        return {}

    def apply(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        try:
            return self._checked(self._processor.apply(logits), logits)
        except LogitsProcessorFault as fault:
            raise ProcessorFault(fault.rows, self._failed("apply", fault)) from fault
        except Exception as error:
            reason = self._failed("apply", error)
            # The interface does not tell who uses a processor: those with arguments of their own, else all.
            users = [row for row, request in enumerate(metadata.requests) if request.params.extra_args]
            raise ProcessorFault(users or range(metadata.num_rows), reason) from error


def context_of_rows(slots: np.ndarray, token_ids: np.ndarray, total_len: np.ndarray, device: Any) -> LogitsContext:
    """Describe rows to slot-keyed processors.

    slots      [rows] slot of each row's request
    token_ids  [slots, length] every slot's tokens      total_len  [slots] how many it has
    """
    lengths = total_len[slots]
    mapping = torch.from_numpy(slots.astype(np.int32)).to(device)
    return LogitsContext(
        expanded_idx_mapping=mapping,
        idx_mapping=mapping,
        idx_mapping_np=slots.astype(np.int32),
        expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32, device=device),
        input_ids=torch.from_numpy(token_ids[slots, lengths - 1].astype(np.int32)).to(device),
        pos=torch.from_numpy((lengths - 1).astype(np.int64)).to(device),
        seq_lens_upper_bound_np=lengths.astype(np.int32),
    )
