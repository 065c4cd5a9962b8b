"""Batch files: what is a request, what is kept of an interrupted run, and that the output is whole or as it was."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from hardpoint.errors import ConfigError
from hardpoint.front_end.batch.files import BatchRequest, Results, check_apart, local_input, look_at, read_requests

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def requests_of(tmp_path, *lines: bytes, limit: int = 1000) -> list[BatchRequest]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    return list(read_requests(path, limit))


def test_requests_are_read_line_by_line_and_blank_lines_are_none(tmp_path):
    second = json.dumps({**GOOD, "custom_id": "b"}).encode()
    first, other = requests_of(tmp_path, json.dumps(GOOD).encode(), b"", b"  ", second, b"")
    assert (first.custom_id, first.path, json.loads(first.body), first.problem) == ("a", GOOD["url"], GOOD["body"], "")
    assert (other.custom_id, other.line) == ("b", 4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 990, "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"url": "/v1/completions"}', "no custom_id"),
        (b'{"custom_id": 3}', "no custom_id"),
        (json.dumps({**GOOD, "method": "GET"}).encode(), "'GET' is not possible"),
        (json.dumps({**GOOD, "url": None}).encode(), "url is missing"),
        (json.dumps({**GOOD, "body": "x"}).encode(), "body is missing"),
        (json.dumps({**GOOD, "body": {"stream": True}}).encode(), "stream is not possible"),
        (b'{"custom_id": "' + b"x" * 2000 + b'"}', "longer than 1000 bytes"),
    ],
)
def test_a_line_that_is_no_request_says_why_and_does_not_hurt_the_next(tmp_path, line, said):
    bad, good = requests_of(tmp_path, line, json.dumps(GOOD).encode())
    assert said in bad.problem
    assert good.problem == ""


def test_a_custom_id_that_stands_twice_is_refused_naming_both_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(GOOD) for _ in range(2)))
    with pytest.raises(ConfigError, match="line 1 and in line 2"):
        look_at(path, 1000)


def test_a_missing_input_is_named(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"there is no file .*gone\.jsonl"),
        local_input(str(tmp_path / "gone.jsonl"), None),
    ):
        pass


def request(custom_id: str) -> BatchRequest:
    return BatchRequest(1, custom_id, "/v1/completions", b"{}")


def response(status: int) -> dict:
    return {"status_code": status, "request_id": "r", "body": {}}


def test_an_interrupted_run_keeps_what_asking_again_would_not_change(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("before")
    first = Results(output, "key-of-a-run", fresh=False)
    first.add(request("ok"), response(200), None)
    first.add(request("refused"), response(400), None)
    first.add(request("broken"), response(500), None)
    first.add(BatchRequest(9, None), None, {"message": "no JSON"})
    first.close()
    with first.partial.open("ab") as file:
        file.write(b'{"custom_id": "cut", "response": {"status_code": 200')
    assert output.read_text() == "before"

    second = Results(output, "key-of-a-run", fresh=False)
    assert set(second.answered) == {"ok", "refused"}
    second.add(request("broken"), response(200), None)
    second.publish()
    assert sorted(json.loads(line)["custom_id"] for line in output.read_text().splitlines()) == [
        "broken",
        "ok",
        "refused",
    ]
    assert list(tmp_path.iterdir()) == [output]


def test_another_input_or_a_fresh_run_takes_nothing_over(tmp_path):
    output = tmp_path / "out.jsonl"
    first = Results(output, "key-of-a-run", fresh=False)
    first.add(request("ok"), response(200), None)
    first.close()
    with closing(Results(output, "another-key", fresh=False)) as other:
        assert other.answered == {}
    with closing(Results(output, "key-of-a-run", fresh=True)) as fresh:
        assert fresh.answered == {}


def test_an_output_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        Results(tmp_path / "gone" / "out.jsonl", "key", fresh=False)


def test_an_output_that_is_a_folder_is_refused_before_anything_is_asked(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written to .*: Is a directory"):
        Results(tmp_path, "key", fresh=False)


def test_results_never_take_the_place_of_the_requests(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(source)
    for output in (source, tmp_path / "link.jsonl", tmp_path / "." / "in.jsonl"):
        with pytest.raises(ConfigError, match="would take the place of the requests"):
            check_apart(source, output)
    check_apart(source, tmp_path / "out.jsonl")


def test_what_an_earlier_run_left_is_on_the_disk_again_at_once(tmp_path):
    output = tmp_path / "out.jsonl"
    first = Results(output, "key-of-a-run", fresh=False)
    first.add(request("ok"), response(200), None)
    first.close()
    second = Results(output, "key-of-a-run", fresh=False)
    assert second.partial.read_bytes().count(b"\n") == 1
    second.close()


def test_a_run_without_results_leaves_nothing(tmp_path):
    results = Results(tmp_path / "out", "key-of-a-run", fresh=False)
    assert results.partial.exists()
    results.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_loses_no_earlier_result(tmp_path, monkeypatch):
    first = Results(tmp_path / "out", "key-of-a-run", fresh=False)
    first.add(request("ok"), response(200), None)
    first.close()
    before = first.partial.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match="No space left"):
            Results(tmp_path / "out", "key-of-a-run", fresh=False)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
