"""`run-batch` when it cannot go on: what is left, and what the user is told."""

from __future__ import annotations

import argparse
import json
import logging

import pytest

from hardpoint.errors import StartError
from hardpoint.front_end.batch.files import read_requests
from hardpoint.processes import batch
from hardpoint.processes.stopping import StopRequested


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run over three requests with the engine replaced: `answered` of them are, then `failure` comes."""
    source = tmp_path / "in.jsonl"
    body = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    source.write_text("\n".join(json.dumps({"custom_id": name, **body}) for name in "abc"))
    monkeypatch.setattr(batch, "configure", lambda role: None)
    monkeypatch.setattr(batch, "end_strays", lambda: None)

    def start(answered: int, failure: BaseException | None):
        def instead(args, signals, source, facts, results):
            asked = [one for one in read_requests(source, 1000) if one.custom_id not in results.answered]
            for one in asked[:answered]:
                results.add(one, {"status_code": 200, "body": {}}, None)
            if failure is not None:
                raise failure
            results.publish()
            return 0

        monkeypatch.setattr(batch, "_run", instead)
        return batch.run(
            argparse.Namespace(
                input_file=str(source),
                output_file=str(tmp_path / "out"),
                output_tmp_dir=None,
                no_resume=False,
                model="m",
            )
        )

    return start


@pytest.mark.parametrize("failure", [StartError("the engine has ended", code="x"), OSError("no space left")])
def test_a_failure_says_how_to_go_on_and_the_next_run_does(run, tmp_path, caplog, failure):
    with caplog.at_level(logging.WARNING), pytest.raises(type(failure)):
        run(2, failure)
    (partial,) = tmp_path.glob("out.*.partial")
    assert f"2 of 3 results are in {partial}: the same command goes on from there" in caplog.text
    assert "--no-resume" in caplog.text
    assert run(1, None) == 0
    names = [json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines()]
    assert names == ["a", "b", "c"]
    assert not partial.exists()


@pytest.mark.parametrize("failure", [StartError("no such model", code="x"), StopRequested(15)])
def test_a_run_that_has_answered_nothing_leaves_nothing(run, tmp_path, caplog, failure):
    if isinstance(failure, StopRequested):
        assert run(0, failure) == batch.INTERRUPTED
    else:
        with pytest.raises(StartError):
            run(0, failure)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    assert ".partial" not in caplog.text
