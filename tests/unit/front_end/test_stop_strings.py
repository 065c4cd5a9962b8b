"""The first stop string of a text is found however the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hardpoint.front_end.stop_strings import StopMatcher

LETTERS = st.text("ab\u00e9", max_size=30)
STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the match that ends first ends, and which string it is: by looking at every prefix."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 30)))
def test_the_match_does_not_depend_on_the_cut(text, stops, cuts):
    matcher, fed, found = StopMatcher(stops), 0, None
    for cut in sorted({*[min(cut, len(text)) for cut in cuts], len(text)}):
        match = matcher.feed(text[fed:cut])
        if match is not None:
            found = (fed + match.end, match.stop)
            break
        fed = cut
    assert found == first_match(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_pending_is_the_longest_beginning_of_a_stop_at_the_end(text, stops):
    matcher = StopMatcher(stops)
    matcher.feed(text, active=False)
    beginnings = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    assert matcher.pending == max(beginnings, default=0)


def test_an_inactive_match_does_not_count_but_one_begun_there_does():
    matcher = StopMatcher(["abc", "xy"])
    assert matcher.feed("xyab", active=False) is None
    assert matcher.feed("cd") == ("abc", 1)


def test_no_stop_strings_never_match():
    matcher = StopMatcher([])
    assert matcher.feed("anything") is None
    assert matcher.pending == 0


def test_a_long_stop_string_costs_a_step_per_character():
    """Quadratic matching would take minutes here."""
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher([stop])
    assert matcher.feed("a" * 40_000) is None
    assert matcher.feed("b").stop == stop
