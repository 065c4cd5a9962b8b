from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hardpoint.engine_core.kv_cache.block_pool import BlockPool, FreeBlockList, KVCacheBlock
from hardpoint.engine_core.kv_cache.residency import BlockResidency


class PoolMachine(RuleBasedStateMachine):
    """Compares the pool with a plain model: lists of holders, and an ordered list of free blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9, enable_caching=True)
        self.held: list[list[KVCacheBlock]] = []
        self.free_order = [block.block_id for block in self.pool.blocks[1:]]
        self.cached: dict[bytes, int] = {}
        self.next_key = 0

    @precondition(lambda self: self.free_order)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(1, len(self.free_order)))
        blocks = self.pool.get_new_blocks(count)
        assert [block.block_id for block in blocks] == self.free_order[:count]
        self.free_order = self.free_order[count:]
        taken = {block.block_id for block in blocks}
        self.cached = {key: block_id for key, block_id in self.cached.items() if block_id not in taken}
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free_blocks(reversed(blocks))
        for block in reversed(blocks):
            if not any(block in others for others in self.held):
                # What nobody can find is reused first.
                findable = block.block_id in self.cached.values()
                self.free_order.insert(len(self.free_order) if findable else 0, block.block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), same=st.booleans())
    def cache(self, data, same):
        blocks = data.draw(st.sampled_from(self.held))
        block = data.draw(st.sampled_from(blocks))
        if not same:
            self.next_key += 1
        key = b"%d" % self.next_key
        self.pool.cache_block(block, key)
        replaces = key not in self.cached or self.cached[key] in self.free_order
        if block.block_id not in self.cached.values() and replaces:
            self.cached[key] = block.block_id

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def hit(self, data):
        key = data.draw(st.sampled_from(sorted(self.cached)))
        block = self.pool.get_cached_block(key)
        assert block.block_id == self.cached[key]
        self.pool.touch([block])
        if block.block_id in self.free_order:
            self.free_order.remove(block.block_id)
        self.held.append([block])

    @rule()
    def reset(self):
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.cached = {}

    @invariant()
    def agrees(self):
        assert self.pool.get_num_free_blocks() == len(self.free_order)
        assert self.pool.get_usage() == pytest.approx(1 - len(self.free_order) / 8)
        for key in (b"%d" % number for number in range(self.next_key + 1)):
            block = self.pool.get_cached_block(key)
            assert (block and block.block_id) == self.cached.get(key)
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == sum(block in blocks for blocks in self.held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_null_block_is_never_given_out_nor_counted():
    pool = BlockPool(4, enable_caching=True)
    taken = pool.get_new_blocks(3)
    assert pool.null_block.block_id == 0
    assert [block.block_id for block in taken] == [1, 2, 3]
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, *taken])
    assert pool.get_num_free_blocks() == 3
    assert pool.get_usage() == 0.0


def test_asking_for_too_many_changes_nothing():
    pool = BlockPool(4, enable_caching=True)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.get_new_blocks(4)
    assert pool.get_num_free_blocks() == 3


def test_freeing_twice_is_caught():
    pool = BlockPool(3, enable_caching=True)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed too often"):
        pool.free_blocks(blocks)


def test_free_list_takes_out_from_anywhere():
    blocks = [KVCacheBlock(number) for number in range(5)]
    free = FreeBlockList(blocks)
    free.remove(blocks[2])
    free.remove(blocks[4])
    free.append(blocks[2])
    assert [block.block_id for block in free.blocks()] == [0, 1, 3, 2]
    assert [free.popleft().block_id for _ in range(4)] == [0, 1, 3, 2]
    with pytest.raises(IndexError):
        free.popleft()
    with pytest.raises(AssertionError, match="is not free"):
        free.remove(blocks[0])


def test_residency_reports_evictions_of_cached_blocks():
    now = [0.0]
    residency = BlockResidency(sample_rate=1.0, clock=lambda: now[0])
    pool = BlockPool(2, enable_caching=True, residency=residency)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"key")
    pool.free_blocks([block])
    for now[0] in (1.0, 3.0):
        pool.touch([block])
        pool.free_blocks([block])
    now[0] = 10.0
    pool.get_new_blocks(1)
    assert residency.take_events() == [(10.0, 7.0, [2.0])]
    assert residency.take_events() == []
