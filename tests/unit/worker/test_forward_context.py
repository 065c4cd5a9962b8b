"""The context of a forward pass, and the groups of ranks."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from hardpoint.config.sections import VllmConfig
from hardpoint.worker import forward_context
from hardpoint.worker.distributed import parallel_state
from hardpoint.worker.forward_context import (
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_forward_context,
)


def test_a_context_is_there_inside_only_and_nests():
    config = VllmConfig()
    layers = config.compilation_config.static_forward_context
    assert not is_forward_context_available()
    with pytest.raises(AssertionError, match="set_forward_context"):
        get_forward_context()
    with set_forward_context({"a": "outer"}, config, 3, slot_mapping={"a": torch.ones(1)}) as outer:
        assert get_forward_context() is outer
        assert outer.no_compile_layers is layers
        with suppress(KeyError), set_forward_context(None, config):
            assert get_forward_context().attn_metadata is None
            raise KeyError
        assert get_forward_context().attn_metadata == {"a": "outer"}
        with override_forward_context(None):
            assert not is_forward_context_available()
    assert forward_context._current is None


def test_a_group_of_one():
    group = parallel_state.get_tp_group()
    x = torch.randn(2, 4)
    for result in (
        group.all_reduce(x),
        group.all_gather(x),
        group.reduce_scatter(x),
        group.gather(x),
        group.broadcast(x),
    ):
        assert torch.equal(result, x)
    assert (group.world_size, group.rank_in_group, group.is_first_rank, group.is_last_rank) == (1, 0, True, True)
    assert (group.next_rank, group.prev_rank) == (0, 0)
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    assert parallel_state.get_pp_group().is_last_rank


def test_groups_must_make_up_the_world():
    try:
        parallel_state.init_distributed_environment(1, 0)
        with pytest.raises(RuntimeError, match="2 tensor-parallel times 1 pipeline ranks are not the 1 ranks"):
            parallel_state.initialize_model_parallel(2, 1)
        parallel_state.destroy_model_parallel()
        parallel_state.ensure_model_parallel_initialized(1, 1)
        parallel_state.ensure_model_parallel_initialized(1, 1)
        assert parallel_state.model_parallel_is_initialized()
        with pytest.raises(AssertionError, match="tensor parallel size"):
            parallel_state.ensure_model_parallel_initialized(2, 1)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def test_exact_splits():
    assert parallel_state.divide(12, 4) == 3
    with pytest.raises(AssertionError, match="equal parts"):
        parallel_state.divide(12, 5)
    parts = parallel_state.split_tensor_along_last_dim(torch.arange(8).view(2, 4), 2, contiguous_split_chunks=True)
    assert [part.tolist() for part in parts] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(part.is_contiguous() for part in parts)
