import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.types.schedule import NewRequestData, SchedulerOutput
from hardpoint.worker.batch import BlockTable, RequestTable
from hardpoint.worker.step_inputs import attention_inputs, build_step, model_inputs

BLOCK = 4


def table_of(lengths, computed):
    table = RequestTable(len(lengths), 64, 1000, torch.device("cpu"))
    table.set_block_tables([BlockTable(len(lengths), 17, BLOCK)])
    plan = SchedulerOutput.make_empty()
    plan.scheduled_new_reqs = [
        NewRequestData(str(i), [100 * i + k for k in range(length)], [], None, None, (blocks_of(i),), computed[i], None)
        for i, length in enumerate(lengths)
    ]
    return table, table.apply(plan)


def blocks_of(index):
    return [20 * index + k + 1 for k in range(16)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_token_has_its_id_position_and_cache_slot(data):
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    computed = [data.draw(st.integers(0, length - 1)) for length in lengths]
    counts = {str(i): data.draw(st.integers(0, lengths[i] - computed[i])) for i in range(len(lengths))}
    if not any(counts.values()):
        counts["0"] = lengths[0] - computed[0]
    table, states = table_of(lengths, computed)
    step = build_step(table, states, counts, None)
    ids, positions = model_inputs(table, step)
    (common,) = attention_inputs(table, step, positions)
    expected = [
        (100 * i + p, p, blocks_of(i)[p // BLOCK] * BLOCK + p % BLOCK)
        for i in range(len(lengths))
        for p in range(computed[i], computed[i] + counts[str(i)])
    ]
    assert list(zip(ids.tolist(), positions.tolist(), common.slot_mapping.tolist(), strict=True)) == expected
    present = [i for i in range(len(lengths)) if counts[str(i)]]
    ends = [computed[i] + counts[str(i)] for i in present]
    assert [state.req_id for state in step.states] == [str(i) for i in present]
    assert common.seq_lens.tolist() == ends
    assert common.query_start_loc.tolist() == [0, *np.cumsum([counts[str(i)] for i in present])]
    assert common.max_seq_len == max(ends)
    assert common.max_query_len == max(counts.values())
    assert step.completes.tolist() == [end == lengths[i] for i, end in zip(present, ends, strict=True)]
    for row, i in enumerate(present):
        used = -(-ends[row] // BLOCK)
        assert common.block_table_tensor[row, :used].tolist() == blocks_of(i)[:used]


def test_a_backend_may_ask_for_short_requests_first():
    table, states = table_of([10, 3, 8, 2], [0, 2, 0, 1])
    step = build_step(table, states, {"0": 10, "1": 1, "2": 8, "3": 1}, decodes_first_up_to=1)
    assert [state.req_id for state in step.states] == ["1", "3", "0", "2"]
    assert step.last_rows.tolist() == [0, 1, 11, 19]


@pytest.mark.parametrize("counts", [{"0": 1, "1": 1}, {"0": 2, "1": 3}])
def test_types_are_those_models_expect(counts):
    table, states = table_of([5, 6], [3, 3])
    step = build_step(table, states, counts, None)
    ids, positions = model_inputs(table, step)
    (common,) = attention_inputs(table, step, positions)
    assert (ids.dtype, positions.dtype) == (torch.int32, torch.int64)
    assert (common.block_table_tensor.dtype, common.slot_mapping.dtype) == (torch.int32, torch.int64)
    assert (common.seq_lens.dtype, common.query_start_loc.dtype) == (torch.int32, torch.int32)
