"""What the scheduler keeps of encoded media: shared by content, bounded, and never planned for nobody."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from hardpoint.engine_core.scheduler.encoder_cache import EncoderCacheManager, MediaPlanner
from hardpoint.types.multimodal import MultiModalFeatureSpec, PlaceholderRange


def request(name: str, *items: tuple[str, int, int]) -> Any:
    features = [MultiModalFeatureSpec(None, "image", item, PlaceholderRange(at, size)) for item, at, size in items]
    return SimpleNamespace(request_id=name, mm_features=features, num_computed_tokens=0)


def planner(size: int, budget: int | None = None, keeps_whole: bool = False) -> MediaPlanner:
    return MediaPlanner(EncoderCacheManager(size), size if budget is None else budget, keeps_whole)


def test_an_item_is_encoded_once_for_all_who_hold_it():
    media = planner(10)
    first, second = request("a", ("x", 2, 6)), request("b", ("x", 0, 6))
    media.begin_step()
    assert media.fit(first, 0, 20) == (20, [0])
    media.keep(first, [0])
    assert media.fit(second, 0, 20) == (20, [])
    media.keep(second, [])
    assert media.take_plan() == {"a": [0]}
    first.num_computed_tokens = 20
    media.release_computed(first)
    assert not media.manager.freeable
    second.num_computed_tokens = 20
    media.release_computed(second)
    assert list(media.manager.freeable) == ["x"]
    # It stays until the room is needed.
    third = request("c", ("y", 0, 6))
    media.begin_step()
    assert media.fit(third, 0, 20) == (20, [0])
    assert media.manager.get_freed_mm_hashes() == ["x"]


def test_what_finds_no_room_waits_behind_the_text_before_it():
    media = planner(10, 8)
    one = request("a", ("x", 3, 6), ("y", 12, 6))
    media.begin_step()
    # The second image is beyond this step's budget.
    assert media.fit(one, 0, 30) == (12, [0])
    media.keep(one, [0])
    one.num_computed_tokens = 12
    media.begin_step()
    media.release_computed(one)
    assert media.fit(one, 12, 18) == (18, [1])
    other = request("b", ("z", 0, 6))
    media.keep(one, [1])
    assert media.fit(other, 0, 10) == (0, [])


def test_items_are_kept_whole_on_request():
    media = planner(50, keeps_whole=True)
    one = request("a", ("x", 4, 6))
    media.begin_step()
    assert media.fit(one, 0, 8) == (4, [])
    assert media.fit(one, 4, 8) == (8, [0])
    assert planner(50).fit(one, 0, 8) == (8, [0])


def test_a_plan_that_is_dropped_is_handed_over_or_forgotten():
    media = planner(10)
    first, second = request("a", ("x", 2, 6)), request("b", ("w", 0, 2), ("x", 3, 6))
    media.begin_step()
    media.keep(first, media.fit(first, 0, 20)[1])
    media.keep(second, media.fit(second, 0, 20)[1])
    assert media.take_plan() == {"a": [0], "b": [0]}
    media.drop(first)
    assert media.take_plan() == {"b": [0, 1]}
    media.drop(second)
    assert media.take_plan() == {}
    assert not media.manager.cached
    assert media.manager.num_free_slots == media.manager.num_freeable_slots == 10


def test_a_failed_request_leaves_nothing_behind():
    media = planner(10)
    one = request("a", ("x", 0, 6))
    media.begin_step()
    media.keep(one, media.fit(one, 0, 20)[1])
    media.manager.drop(one)
    assert media.manager.get_freed_mm_hashes() == ["x"]
    media.begin_step()
    assert media.fit(request("b", ("x", 0, 6)), 0, 20) == (20, [0])


def test_what_can_never_be_encoded_is_told():
    media = planner(10)
    assert media.why_impossible(request("a", ("x", 0, 6), ("y", 8, 6)), False) is None
    assert "12 embeddings" in str(media.why_impossible(request("a", ("x", 0, 6), ("y", 8, 6)), True))
    assert media.why_impossible(request("a", ("x", 0, 6), ("x", 8, 6)), True) is None
    assert "at most 10" in str(media.why_impossible(request("a", ("x", 0, 11)), False))


def encoded(media: MediaPlanner, live: list[Any]) -> set[str]:
    """The items that a step's plan brings."""
    by_name = {one.request_id: one for one in live}
    plan = media.take_plan().items()
    return {by_name[name].mm_features[number].identifier for name, numbers in plan for number in numbers}


def needed(one: Any, count: int) -> set[str]:
    """The items that the next `count` tokens of a request belong to."""
    start, end = one.num_computed_tokens, one.num_computed_tokens + count
    features = one.mm_features
    return {item.identifier for item in features if item.mm_position.offset < end and item.mm_position.end > start}


def test_random_steps_keep_the_books():
    """Whatever happens, the workers have what a step needs, and the room adds up."""
    chance = random.Random(4)
    media, there = planner(12, 9), set()
    sizes = {f"i{number}": chance.randint(1, 6) for number in range(6)}
    live: list[Any] = []
    for step in range(600):
        if len(live) < 4:
            items, at = [], 0
            for _ in range(chance.randint(1, 3)):
                name = chance.choice(sorted(sizes))
                at += chance.randint(0, 3)
                items.append((name, at, sizes[name]))
                at += sizes[name]
            live.append(request(f"r{step}", *items))
        media.begin_step()
        planned = []
        for one in live:
            count, items = media.fit(one, one.num_computed_tokens, chance.randint(1, 9))
            if not count:
                continue
            if chance.random() < 0.2:
                media.drop(one)
                one.num_computed_tokens = 0
                continue
            media.keep(one, items)
            planned.append((one, count))
            if chance.random() < 0.1:
                victim = chance.choice(planned)
                planned.remove(victim)
                media.drop(victim[0])
                victim[0].num_computed_tokens = 0
        there -= set(media.manager.get_freed_mm_hashes())
        there |= encoded(media, live)
        for one, count in planned:
            assert needed(one, count) <= there
            one.num_computed_tokens += count
            media.release_computed(one)
        held = sum(sizes[name] for name in media.manager.cached)
        assert media.manager.num_free_slots == 12 - held >= 0
        assert media.manager.num_freeable_slots == media.manager.num_free_slots + sum(media.manager.freeable.values())
        for one in live:
            if one.num_computed_tokens >= one.mm_features[-1].mm_position.end:
                media.manager.free(one)
        live = [one for one in live if one.num_computed_tokens < one.mm_features[-1].mm_position.end]
