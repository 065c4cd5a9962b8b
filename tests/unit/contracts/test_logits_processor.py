from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.contracts import logits_processor as contract
from hardpoint.contracts.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LiveOutput,
    LogitsProcessorFault,
    LogitsProcessorV1,
    LogitsProcessorV2,
    MoveDirectionality,
    load_logits_processor_classes,
    process_dict_updates,
)
from hardpoint.types.sampling_params import SamplingParams

SWAP, ONE_WAY = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL


class Old(LogitsProcessorV1):
    pass


class New(LogitsProcessorV2):
    def apply(self, logits, ctx):
        return logits


def config(named=None, runner_type="generate"):
    return SimpleNamespace(model_config=SimpleNamespace(logits_processors=named, runner_type=runner_type))


def test_installed_processors_come_before_those_of_the_configuration(monkeypatch):
    monkeypatch.setattr(contract, "load_logits_processors", lambda: [New])
    assert load_logits_processor_classes(config([Old, New])) == [New, Old, New]
    assert load_logits_processor_classes(config()) == [New]


def test_a_reference_is_loaded():
    named = ["hardpoint.contracts.logits_processor:AdapterLogitsProcessor"]
    assert load_logits_processor_classes(config(named))[-1] is AdapterLogitsProcessor


@pytest.mark.parametrize("named", [["no colon"], ["json:loads"], [dict]])
def test_what_is_no_processor_class_is_refused(named):
    with pytest.raises(ValueError, match="logits processor"):
        load_logits_processor_classes(config(named))


def test_a_pooling_model_takes_none(monkeypatch):
    monkeypatch.setattr(contract, "load_logits_processors", lambda: pytest.fail("loaded"))
    assert load_logits_processor_classes(config(runner_type="pooling")) == []
    with pytest.raises(ValueError, match="pooling model"):
        load_logits_processor_classes(config([New], runner_type="pooling"))


def test_optional_methods_have_defaults_and_the_others_do_not():
    processor = New(None, None)
    assert processor.add_request(0, SamplingParams()) is True
    assert processor.apply_staged_writes() is None
    assert New.validate_params(SamplingParams()) is None
    with pytest.raises(TypeError, match="abstract"):
        LogitsProcessorV2(None, None)
    with pytest.raises(TypeError, match="abstract"):
        Old(None, None, False)


@given(st.permutations(range(4)), st.sampled_from([SWAP, ONE_WAY]))
def test_a_dict_follows_moves(order, direction):
    entries = {row: f"r{row}" for row in order[:3]}
    source, target = order[0], order[-1]
    expected = dict(entries)
    expected[target] = expected.pop(source)
    changed = process_dict_updates(entries, BatchUpdate(4, [], [], [(source, target, direction)]), lambda *a: None)
    assert changed
    assert entries == expected


def test_a_swap_of_two_entries_keeps_both_and_a_move_drops_what_was_there():
    swapped, moved = {0: "a", 1: "b"}, {0: "a", 1: "b"}
    process_dict_updates(swapped, BatchUpdate(2, [], [], [(0, 1, SWAP)]), lambda *a: None)
    process_dict_updates(moved, BatchUpdate(1, [], [], [(0, 1, ONE_WAY)]), lambda *a: None)
    assert swapped == {0: "b", 1: "a"}
    assert moved == {1: "a"}


def test_a_dict_tells_whether_it_changed():
    entries = {0: "a"}
    assert process_dict_updates(entries, None, lambda *a: "x") is False
    added = (1, SamplingParams(), [], [])
    assert process_dict_updates(entries, BatchUpdate(2, [], [added], []), lambda *a: None) is False
    assert process_dict_updates(entries, BatchUpdate(2, [5], [], []), lambda *a: None) is False
    assert process_dict_updates(entries, BatchUpdate(1, [0], [added], []), lambda *a: "b") is True
    assert entries == {1: "b"}


class Adapter(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        return (params.extra_args or {}).get("call")


def adapter_with(*rows):
    adapter = Adapter(None, None, False)
    added = [
        (row, SamplingParams(extra_args={"call": call}), [1, 2], output) for row, (call, output) in enumerate(rows)
    ]
    adapter.update_state(BatchUpdate(len(rows), [], added, []))
    return adapter


def test_an_adapter_hands_each_row_to_its_callable():
    short = lambda output, logits: logits + len(output)  # noqa: E731 - what plugins give
    long = lambda prompt, output, logits: logits + 10 * len(prompt) + len(output)  # noqa: E731
    adapter = adapter_with((short, [7]), (None, []), (long, [7, 8, 9]))
    assert adapter.apply(torch.zeros(3, 1)).flatten().tolist() == [1.0, 0.0, 23.0]


def test_a_callable_stays_with_its_request_when_that_leaves_and_returns():
    calls = []
    output = LiveOutput()
    adapter = Adapter(None, None, False)

    def make(params):
        calls.append(params)
        return lambda output, logits: logits

    adapter.new_req_logits_processor = make
    entry = (0, SamplingParams(), [1], output)
    adapter.update_state(BatchUpdate(1, [], [entry], []))
    adapter.update_state(BatchUpdate(0, [0], [], []))
    assert not adapter.req_info
    adapter.update_state(BatchUpdate(1, [], [entry], []))
    assert len(calls) == 1
    adapter.update_state(BatchUpdate(1, [], [(0, SamplingParams(), [1], LiveOutput())], []))
    assert len(calls) == 2


def test_an_adapter_names_the_row_that_raised():
    adapter = adapter_with((lambda output, logits: logits, []), (lambda output, logits: 1 / 0, []))
    with pytest.raises(LogitsProcessorFault, match="ZeroDivisionError") as caught:
        adapter.apply(torch.zeros(2, 3))
    assert caught.value.rows == [1]


def test_a_live_output_is_a_list():
    output = LiveOutput([1, 2])
    output.append(3)
    assert output == [1, 2, 3]
    assert isinstance(output, list)
