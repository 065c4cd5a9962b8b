"""The suite for logits processors finds the mistakes that people make with rows and slots."""

from __future__ import annotations

import pytest
import torch

from hardpoint.contracts.logits_processor import (
    AdapterLogitsProcessor,
    LogitsProcessorV1,
    LogitsProcessorV2,
    process_dict_updates,
)
from hardpoint.testing import ContractFailure, check_logits_processor
from hardpoint.types.sampling_params import SamplingParams

PARAMS = SamplingParams(extra_args={"only": 7})


def target(params):
    return (params.extra_args or {}).get("only")


class GoodSlots(LogitsProcessorV2):
    """Bans all tokens but one."""

    def __init__(self, vllm_config, req_states):
        self.only = [None] * req_states.max_num_reqs

    @classmethod
    def validate_params(cls, sampling_params):
        if not isinstance(target(sampling_params), int | None):
            raise ValueError("only must be a token")

    def add_request(self, req_idx, sampling_params):
        self.only[req_idx] = target(sampling_params)
        return self.only[req_idx] is not None

    def apply(self, logits, ctx):
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            self.change(logits, row, self.only[slot])
        return logits

    def change(self, logits, row, token):
        if token is not None:
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept


class GoodRows(LogitsProcessorV1):
    def __init__(self, vllm_config, device, is_pin_memory):
        self.only = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.only, batch_update, lambda params, prompt, output: target(params))

    def apply(self, logits):
        for row, token in self.only.items():
            GoodSlots.change(self, logits, row, token)
        return logits


class GoodAdapter(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        token = target(params)
        return None if token is None else lambda output_ids, row: row.index_fill(0, torch.tensor([token]), 99.0)


class Everything(GoodRows):
    """A temperature for all."""

    def apply(self, logits):
        return logits * 2

    def is_argmax_invariant(self):
        return True


@pytest.mark.parametrize("cls", [GoodSlots, GoodRows, GoodAdapter, Everything])
@pytest.mark.parametrize("params", [None, PARAMS])
def test_good_ones(cls, params):
    check_logits_processor(cls, params)


def slots(**members):
    return type("Bad", (GoodSlots,), members)


def rows(**members):
    return type("Bad", (GoodRows,), members)


def changes_all_rows(self, logits, ctx):
    return logits + 1


def takes_rows_for_slots(self, logits, ctx):
    for row in range(len(logits)):
        self.change(logits, row, self.only[row])
    return logits


def forgets_to_clear(self, req_idx, sampling_params):
    if target(sampling_params) is not None:
        self.only[req_idx] = target(sampling_params)
    return True


def ignores_moves(self, batch_update):
    if batch_update is not None:
        for row in batch_update.removed:
            self.only.pop(row, None)
        for row, params, *_ in batch_update.added:
            self.only[row] = target(params)


def needs_arguments(cls, params):
    if not params.extra_args:
        raise ValueError("extra_args is needed")


def bans_everything(self, logits):
    return torch.full_like(logits, float("-inf"))


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive from"),
        (
            type("Bad", (LogitsProcessorV1,), {}),
            "does not implement __init__, apply, is_argmax_invariant, update_state",
        ),
        (type("Bad", (LogitsProcessorV2,), {}), "does not implement apply"),
        (slots(validate_params=lambda params: None), "validate_params is not a classmethod"),
        (
            slots(validate_params=classmethod(needs_arguments)),
            "a request without arguments of its own, raises ValueError",
        ),
        (slots(add_request=lambda self, req_idx, params: None), "add_request returns None"),
        (slots(add_request=lambda self, req_idx: True), "cannot be called as the host"),
        (slots(apply=lambda self, logits: logits), "cannot be called as the host"),
        (slots(apply=lambda self, logits, ctx: logits[0]), r"apply returns \(448,\)"),
        (slots(apply=lambda self, logits, ctx: None), "apply returns None"),
        (slots(apply=changes_all_rows), "whose request does not ask for it, changes"),
        (slots(apply=takes_rows_for_slots), r"row 0 of 2 gets other logits|does not ask for it"),
        (slots(add_request=forgets_to_clear), "a slot keeps the state of the request that had it before"),
        (rows(is_argmax_invariant=lambda self: None), "is_argmax_invariant returns None"),
        (rows(is_argmax_invariant=lambda self: True), "declared to keep the best token and changes it"),
        (rows(update_state=ignores_moves), "after two rows swap, row 1 gets the logits of another request"),
        (rows(apply=bans_everything), "leaves a row without any token"),
        (rows(apply=lambda self, logits: logits * float("nan")), "no numbers"),
        (rows(__init__=lambda self, config: None), "cannot be called as the host"),
    ],
)
def test_bad_ones(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_logits_processor(cls, PARAMS)


def test_a_processor_that_refuses_the_given_parameters():
    with pytest.raises(ContractFailure, match="for the parameters you gave this suite, raises ValueError"):
        check_logits_processor(GoodSlots, SamplingParams(extra_args={"only": "x"}))
