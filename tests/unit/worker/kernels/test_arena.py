"""Memory for packed weights."""

from __future__ import annotations

from hardpoint.worker.kernels.arena import Arena


def test_parts_are_aligned_and_apart():
    arena = Arena()
    parts = [arena.allocate(size) for size in (1, 100, 64, 40 << 20, 7)]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        part.fill_(number)
    for number, part in enumerate(parts):
        assert bool((part == number).all())


def test_small_parts_share_a_chunk_and_outlive_the_arena():
    arena = Arena()
    first, second = arena.allocate(10), arena.allocate(10)
    assert second.data_ptr() == first.data_ptr() + 64
    del arena, first
    second.fill_(3)
    assert second.tolist() == [3] * 10
