"""The suite for logits processors, of either interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hardpoint.contracts.logits_processor import (
    BatchUpdate,
    LogitsContext,
    LogitsProcessorV1,
    LogitsProcessorV2,
    LogitsProcRequestState,
    MoveDirectionality,
)
from hardpoint.testing.failures import ContractFailure, explained, require, require_call, require_class, require_sync
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.sampling_params import SamplingParams

_SLOTS, _PROMPT = 6, [5, 6, 7]
_CPU = torch.device("cpu")


def check_logits_processor(cls: Any, params: SamplingParams | None = None, vllm_config: Any = None) -> None:
    """Run the processor over batches whose requests come, move and go.

    params       of a request that uses the processor; without it only requests that do not are tried
    vllm_config  what the constructor gets; a configuration of a tiny model unless given
    """
    subject = require_class(cls, LogitsProcessorV1, LogitsProcessorV2)
    config = vllm_config or tiny_vllm_config()
    _check_validation(cls, subject, params)
    suite: _Rows | _Slots
    suite = _Slots(cls, subject, config) if issubclass(cls, LogitsProcessorV2) else _Rows(cls, subject, config)
    plain = SamplingParams()
    _leaves_alone(suite, subject, [plain] * 3)
    if params is None:
        return
    alone = suite.run([params])[0]
    _is_told_apart(suite, subject, params, plain, alone)
    suite.check_life(params, plain, alone)


def _check_validation(cls: Any, subject: str, params: SamplingParams | None) -> None:
    method = inspect.getattr_static(cls, "validate_params")
    require(
        isinstance(method, (classmethod, staticmethod)),
        subject,
        "validate_params is not a classmethod, and the front end has no instance",
        "put @classmethod above it",
    )
    fix = "accept requests that say nothing to the processor: every request passes here"
    with explained(subject, "validate_params, for a request without arguments of its own,", fix):
        cls.validate_params(SamplingParams())
    if params is not None:
        with explained(subject, "validate_params, for the parameters you gave this suite,", "accept them"):
            cls.validate_params(params)


def _leaves_alone(suite: _Rows | _Slots, subject: str, requests: list[SamplingParams]) -> None:
    before = suite.logits(len(requests))
    after = suite.run(requests)
    require(
        torch.equal(before, after) or suite.uses_everything,
        subject,
        "it changes the logits of requests that do not ask for it",
        "leave the rows of other requests as they are",
    )


def _is_told_apart(suite: _Rows | _Slots, subject: str, params: Any, plain: Any, alone: Tensor) -> None:
    """What a request gets does not depend on its row or on who else is in the step."""
    for requests in ([params, plain], [plain, params], [plain, params, params, plain]):
        before, after = suite.logits(len(requests)), suite.run(requests)
        for row, request in enumerate(requests):
            if request is params:
                same = torch.equal(after[row], alone)
                what = f"row {row} of {len(requests)} gets other logits than the same request alone"
            else:
                same = torch.equal(after[row], before[row]) or suite.uses_everything
                what = f"row {row}, whose request does not ask for it, changes beside one whose request does"
            require(same, subject, what, "treat every row by its own request")


class _Suite:
    """What the two interfaces have in common: every row starts from the same logits, so that rows compare."""

    def __init__(self, cls: Any, subject: str, config: Any) -> None:
        self.cls, self.subject, self.config = cls, subject, config
        self.vocab_size = config.model_config.get_vocab_size()

    def logits(self, rows: int) -> Tensor:
        """[rows, vocab] float32."""
        one = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(3))
        return one.repeat(rows, 1)

    def apply(self, change: Callable[..., Any], rows: int, *more: Any) -> Tensor:
        given = self.logits(rows)
        with explained(self.subject, "apply", "it gets logits [rows, vocabulary] and returns a tensor of that shape"):
            changed = change(given, *more)
        require(
            isinstance(changed, Tensor) and changed.shape == (rows, self.vocab_size),
            self.subject,
            f"apply returns {tuple(changed.shape) if isinstance(changed, Tensor) else changed!r}",
            f"return a tensor of shape {(rows, self.vocab_size)}",
        )
        require(not changed.isnan().any(), self.subject, "apply makes logits that are no numbers", "return no NaN")
        everything_banned = bool((changed == float("-inf")).all(dim=-1).any())
        require(not everything_banned, self.subject, "apply leaves a row without any token", "keep at least one token")
        return changed.clone()


class _Slots(_Suite):
    """V2: state per request slot."""

    uses_everything = False

    def __init__(self, cls: Any, subject: str, config: Any) -> None:
        super().__init__(cls, subject, config)
        require_sync(cls, subject, "add_request", "apply", "apply_staged_writes")
        require_call(cls.__init__, subject, "__init__(self, vllm_config, req_states)", None, config, None)
        require_call(cls.apply, subject, "apply(self, logits, ctx)", None, None, None)
        require_call(cls.add_request, subject, "add_request(self, req_idx, sampling_params)", None, 0, None)

    def build(self) -> Any:
        tokens = np.zeros((_SLOTS, 64), np.int32)
        tokens[:, : len(_PROMPT)] = _PROMPT
        lengths = np.full(_SLOTS, len(_PROMPT), np.int32)
        states = LogitsProcRequestState(
            _CPU, _SLOTS, self.vocab_size, _Held(tokens), _Held(lengths), _Held(lengths), _Held(lengths)
        )
        with explained(self.subject, "the constructor", "it is called with (vllm_config, req_states)"):
            return self.cls(self.config, states)

    def add(self, processor: Any, slot: int, params: SamplingParams) -> bool:
        with explained(self.subject, "add_request", "it overwrites the state of the slot"):
            used = processor.add_request(slot, params)
        require(
            isinstance(used, bool),
            self.subject,
            f"add_request returns {used!r}",
            "return True if this request's logits are to be changed, else False",
        )
        return used

    def step(self, processor: Any, slots: Sequence[int]) -> Tensor:
        with explained(self.subject, "apply_staged_writes", "it is called before every step"):
            processor.apply_staged_writes()
        mapping = np.array(slots, np.int32)
        context = LogitsContext(
            expanded_idx_mapping=torch.from_numpy(mapping),
            idx_mapping=torch.from_numpy(mapping),
            idx_mapping_np=mapping,
            expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32),
            input_ids=torch.full((len(slots),), _PROMPT[-1], dtype=torch.int32),
            pos=torch.full((len(slots),), len(_PROMPT) - 1, dtype=torch.int64),
            seq_lens_upper_bound_np=np.full(len(slots), len(_PROMPT), np.int32),
        )
        return self.apply(processor.apply, len(slots), context)

    def run(self, requests: Sequence[SamplingParams]) -> Tensor:
        """Each request in a slot of its own, in one step of a new processor. [requests, vocab]."""
        processor = self.build()
        # Not in the order of the rows: a processor that takes rows for slots shows here.
        slots = [(2 * row + 1) % _SLOTS for row in range(len(requests))]
        used = [self.add(processor, slot, params) for slot, params in zip(slots, requests, strict=True)]
        # The host leaves a processor out of a step that none of its requests is in.
        return self.step(processor, slots) if any(used) else self.logits(len(requests))

    def check_life(self, params: SamplingParams, plain: SamplingParams, alone: Tensor) -> None:
        """A slot is taken by one request after the other; each starts from nothing."""
        processor = self.build()
        self.add(processor, 1, params)
        self.step(processor, [1])
        if hasattr(processor, "remove_request"):
            processor.remove_request(1)
        still_used = self.add(processor, 1, plain)
        other = self.add(processor, 4, params)
        after = self.step(processor, [1, 4]) if still_used or other else self.logits(2)
        left = torch.equal(after[0], self.logits(1)[0])
        fix = "overwrite all state of the slot in add_request"
        require(left, self.subject, "a slot keeps the state of the request that had it before", fix)
        require(torch.equal(after[1], alone), self.subject, "a request that joins later gets other logits", fix)


class _Held:
    """Stands for the worker's buffers."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.np = array
        self.gpu = self.cpu = torch.from_numpy(array)


class _Rows(_Suite):
    """V1: state per row of the batch."""

    def __init__(self, cls: Any, subject: str, config: Any) -> None:
        super().__init__(cls, subject, config)
        require_sync(cls, subject, "apply", "update_state", "is_argmax_invariant")
        shape = "__init__(self, vllm_config, device, is_pin_memory)"
        require_call(cls.__init__, subject, shape, None, config, _CPU, False)
        require_call(cls.apply, subject, "apply(self, logits)", None, None)
        invariant = self.build().is_argmax_invariant()
        require(
            isinstance(invariant, bool),
            subject,
            f"is_argmax_invariant returns {invariant!r}",
            "return True if the best token stays the best, else False",
        )
        self.keeps_best = invariant
        # The interface has no way to say that a request does not use it.
        self.uses_everything = not torch.equal(self.run([SamplingParams()]), self.logits(1))

    def build(self) -> Any:
        with explained(self.subject, "the constructor", "it is called with (vllm_config, device, is_pin_memory)"):
            return self.cls(self.config, _CPU, False)

    def tell(self, processor: Any, update: BatchUpdate | None) -> None:
        with explained(self.subject, "update_state", "it is called every step, with None when no row changed"):
            processor.update_state(update)

    def step(self, processor: Any, rows: int) -> Tensor:
        changed = self.apply(processor.apply, rows)
        if self.keeps_best:
            best = torch.equal(changed.argmax(dim=-1), self.logits(rows).argmax(dim=-1))
            fix = "return False from is_argmax_invariant"
            require(best, self.subject, "it is declared to keep the best token and changes it", fix)
        return changed

    def run(self, requests: Sequence[SamplingParams]) -> Tensor:
        """All requests added in one update, then one step of a new processor. [requests, vocab]."""
        processor = self.build()
        self.tell(processor, BatchUpdate(len(requests), [], [_added(row, one) for row, one in enumerate(requests)], []))
        return self.step(processor, len(requests))

    def check_life(self, params: SamplingParams, plain: SamplingParams, alone: Tensor) -> None:
        """Rows stay, swap, move into a gap and go; each request gets what it gets in a batch of its own."""
        processor = self.build()
        one, other, third = self.solo(plain), self.solo(params), self.solo(plain)
        self.tell(processor, None)
        self.tell(processor, BatchUpdate(3, [], [_added(0, plain), _added(1, params), _added(2, plain)], []))
        self._expect(processor, [one, other, third], "three requests join")
        self.tell(processor, None)
        self._expect(processor, [one, other, third], "a step passes without a change")
        self.tell(processor, BatchUpdate(3, [], [], [(1, 2, MoveDirectionality.SWAP)]))
        self._expect(processor, [one, third, other], "two rows swap")
        self.tell(processor, BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
        self._expect(processor, [other, third], "a row moves into the gap of one that is gone")
        self.tell(processor, BatchUpdate(2, [], [_added(0, plain)], []))
        self._expect(processor, [self.solo(plain), third], "a request takes the row of one that has ended")
        self.tell(processor, BatchUpdate(0, [0, 1], [], []))

    def solo(self, params: SamplingParams) -> Any:
        """A processor with one request, to compare with."""
        processor = self.build()
        self.tell(processor, BatchUpdate(1, [], [_added(0, params)], []))
        return processor

    def _expect(self, processor: Any, requests: list[Any], when: str) -> None:
        after = self.step(processor, len(requests))
        for row, solo in enumerate(requests):
            if not torch.equal(after[row], self.step(solo, 1)[0]):
                raise ContractFailure(
                    self.subject,
                    f"after {when}, row {row} gets the logits of another request",
                    "follow `removed`, then `added`, then `moved`; process_dict_updates does it for a dict",
                )
            self.tell(solo, None)


def _added(row: int, params: SamplingParams) -> Any:
    return (row, params, list(_PROMPT), [])
