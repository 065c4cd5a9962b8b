from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import pytest

from hardpoint.extensions.typed_values import Text, ValueProblem, check_fields, convert, guess, in_words


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass
class Server:
    host: str = "localhost"
    port: int = 80


@dataclass
class Whole:
    server: Server
    names: list[str] = field(default_factory=list)


UserId = NewType("UserId", int)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("5", int, 5),
        ("-5", int, -5),
        ("5", float, 5.0),
        ("1e-3", float, 0.001),
        ("true", bool, True),
        ("No", bool, False),
        ("0", bool, False),
        ("123", str, "123"),
        ("1.10", str, "1.10"),
        ("true", str, "true"),
        ('"quoted"', str, "quoted"),
        ('"half', str, '"half'),
        ("/tmp/x", Path, Path("/tmp/x")),
        ("fast", Mode, Mode.FAST),
        ("EXACT", Mode, Mode.EXACT),
        ("fast", Literal["fast", "exact"], "fast"),
        ("2", Literal[1, 2], 2),
        ("null", int | None, None),
        ("7", int | None, 7),
        ("7", int | str, 7),
        ("7", str | int, 7),
        ("x", int | str, "x"),
        ("a, b,", list[str], ["a", "b"]),
        ("[1, 2]", list[int], [1, 2]),
        ("1,2", list[int], [1, 2]),
        ("1,2", tuple[int, ...], (1, 2)),
        ("[1, 2]", tuple[int, str], None),
        ("a,a", set[str], {"a"}),
        ("a,b", Sequence[str], ["a", "b"]),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ('{"1": 2}', Mapping[int, int], {1: 2}),
        ('{"port": 81}', Server, Server(port=81)),
        ("[1, {}]", Any, [1, {}]),
        ("plain", Any, "plain"),
        ("5", Annotated[int, "bounds"], 5),
        ("5", UserId, 5),
    ],
)
def test_text_is_read_as_its_type(text, kind, expected):
    if expected is None and kind != (int | None):
        with pytest.raises(ValueProblem):
            convert(Text(text), kind)
        return
    found = convert(Text(text), kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (5, float, 5.0),
        ("5", str, "5"),
        (True, bool, True),
        (None, str | None, None),
        ([1, 2], list[float], [1.0, 2.0]),
        ({"server": {"port": 8}, "names": ["a"]}, Whole, Whole(Server(port=8), ["a"])),
        ({"server": Server()}, Whole, Whole(Server())),
        (Mode.FAST, Mode, Mode.FAST),
    ],
)
def test_plain_values_are_taken_as_they_are(value, kind, expected):
    assert convert(value, kind) == expected


@pytest.mark.parametrize(
    ("value", "kind", "path", "what"),
    [
        ("5", int, "", "is '5': expected a whole number"),
        (5, str, "", "is 5: expected text"),
        (True, int, "", "is True: expected a whole number"),
        (1, bool, "", "is 1: expected true or false"),
        (1.5, int, "", "is 1.5: expected a whole number"),
        (Text("high"), float, "", "is 'high': expected a number"),
        (Text("maybe"), bool, "", "is 'maybe': expected true or false"),
        (Text("fsat"), Literal["fast", "exact"], "", "is 'fsat': expected 'fast' or 'exact'; did you mean 'fast'?"),
        (Text("slow"), Mode, "", "is 'slow': expected 'fast' or 'exact'"),
        (Text("x"), int | float, "", "is 'x': expected a whole number or a number"),
        ([1, "x"], list[int], "[1]", "is 'x': expected a whole number"),
        ([1], tuple[int, int], "", "has 1 items: expected 2"),
        (3, list[int], "", "is 3: expected a list of a whole number each"),
        (3, dict[str, int], "", "is 3: expected a JSON object"),
        ({"a": "x"}, dict[str, int], ".a", "is 'x': expected a whole number"),
        ({"server": {"port": "x"}}, Whole, "server.port", "is 'x': expected a whole number"),
        ({"server": {"prot": 1}}, Whole, "server.prot", "is not known; did you mean 'port'? there are: host, port"),
        ({}, Whole, "server", "is missing: expected a JSON object with host, port"),
        (Text("{"), Server, "", "is '{': expected a JSON object with host, port"),
    ],
)
def test_a_wrong_value_is_said_with_its_place_and_what_is_expected(value, kind, path, what):
    with pytest.raises(ValueProblem) as caught:
        convert(value, kind)
    assert (caught.value.path, caught.value.what) == (path, what)


def test_every_problem_of_a_mapping_is_found():
    _, problems = check_fields({"srever": 1, "names": 3}, Whole)
    assert [problem.path for problem in problems] == ["srever", "names", "server"]


def test_what_a_class_refuses_itself_is_told():
    @dataclass
    class Bounded:
        share: float = 0.5

        def __post_init__(self):
            if not 0 <= self.share <= 1:
                raise ValueError("share must lie between 0 and 1")

    with pytest.raises(ValueProblem, match="refused by Bounded: ValueError: share must lie between 0 and 1"):
        convert({"share": 3}, Bounded)


def test_long_values_are_cut():
    with pytest.raises(ValueProblem) as caught:
        convert("x" * 1000, int)
    assert len(caught.value.what) < 200


def test_without_a_type_text_is_guessed():
    assert guess({"a": Text("1"), "b": {"c": Text("x")}, "d": [Text("[2]")], "e": "1"}) == {
        "a": 1,
        "b": {"c": "x"},
        "d": [[2]],
        "e": "1",
    }


def test_types_in_words():
    assert in_words(int | None) == "a whole number or null"
    assert in_words(list[str]) == "a list of text each"
    assert in_words(list) == "a list"
    assert in_words(Path) == "a path"
