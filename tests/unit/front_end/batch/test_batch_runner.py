"""The runner against an application of a few lines: what it asks, what it refuses, when it asks again."""

from __future__ import annotations

import asyncio
import json

import pytest

from hardpoint.front_end.batch import runner as module
from hardpoint.front_end.batch.files import BatchRequest, Results
from hardpoint.front_end.batch.runner import BatchRunner


class App:
    """Answers each request with its path and body; `statuses` come first, one a request."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.open = self.most_open = 0
        self.keys: set[str] = set()

    async def __call__(self, scope, receive, send) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.keys.add(dict(scope["headers"]).get(b"authorization", b"").decode())
        body = (await receive())["body"]
        await asyncio.sleep(0)
        self.open -= 1
        status = self.statuses.pop(0) if self.statuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"path": "', "more_body": True})
        await send({"type": "http.response.body", "body": scope["path"].encode() + b'", "got": ' + body + b"}"})


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.0)

    def run(app: App, *requests: BatchRequest, **options):
        results = Results(tmp_path / "out.jsonl", "key", fresh=True)
        tally = asyncio.run(BatchRunner(app, results, **options).run(iter(requests)))
        results.publish()
        entries = [json.loads(line) for line in results.output.read_text().splitlines()]
        return tally, {entry["custom_id"]: entry for entry in entries}

    return run


def request(number: int, path: str = "/v1/completions") -> BatchRequest:
    return BatchRequest(number, f"r{number}", path, json.dumps({"n": number}).encode())


def test_every_request_gets_its_own_answer_and_few_are_open_at_once(ask):
    app = App()
    tally, results = ask(app, *map(request, range(40)), at_once=3, key="secret")
    assert (tally.answered, tally.failed, app.most_open, app.keys) == (40, 0, 3, {"Bearer secret"})
    for number in range(40):
        answer = results[f"r{number}"]["response"]
        assert (answer["status_code"], answer["body"]) == (200, {"path": "/v1/completions", "got": {"n": number}})
    assert len({entry["id"] for entry in results.values()}) == 40


def test_a_full_queue_is_waited_for(ask):
    tally, results = ask(App(503, 503, 200), request(1))
    assert (tally.answered, results["r1"]["response"]["status_code"]) == (1, 200)


def test_a_refusal_is_a_result(ask):
    tally, results = ask(App(400), request(1), request(2))
    assert (tally.answered, tally.failed) == (1, 1)
    assert {entry["response"]["status_code"] for entry in results.values()} == {200, 400}


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/v1/load_lora_adapter", "/v1/x?y=1", "v1/completions", "/../v1/x"]
)
def test_routes_that_steer_the_server_are_not_asked(ask, path):
    app = App()
    _, results = ask(app, request(1, path))
    assert app.most_open == 0
    assert "not possible in a batch" in results["r1"]["error"]["message"]
    assert results["r1"]["response"] is None


def test_it_stops_when_the_engine_has_ended(ask):
    tally, results = ask(App(*[500] * 9), *map(request, range(9)), engine_dead=lambda: True)
    assert (tally.answered, results) == (0, {})
