"""IO processors beside the event loop: a refusal stays one, and what is their fault names them."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.errors import EngineGenerateError
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.io_processors import BesideTheLoop


class Faulty(IOProcessor):
    def __init__(self, error, method):
        self.error, self.method = error, method

    def parse_data(self, data):
        return data

    def pre_process(self, prompt, request_id=None, **kwargs):
        return self.perhaps("pre_process", [prompt])

    def post_process(self, model_output, request_id=None, **kwargs):
        return self.perhaps("post_process", {})

    def perhaps(self, method, value):
        if method == self.method:
            raise self.error
        return value


async def a_request(processor):
    beside = BesideTheLoop(processor)
    await beside.before("text", "r")
    return await beside.after([], "r")


@pytest.mark.parametrize("method", ["pre_process", "post_process"])
def test_what_is_no_refusal_names_the_processor_and_stands_in_the_ledger(method):
    before = len(ledger.entries(kind="fault", key="io_processors"))
    with pytest.raises(EngineGenerateError, match="the IO processor Faulty failed: KeyError: 'lost'") as caught:
        asyncio.run(a_request(Faulty(KeyError("lost"), method)))
    assert isinstance(caught.value.__cause__, KeyError)
    (entry,) = ledger.entries(kind="fault", key="io_processors")[before:]
    assert (entry.name, entry.detail) == ("Faulty", caught.value.what)


@pytest.mark.parametrize("method", ["pre_process", "post_process"])
def test_a_refusal_is_passed_on(method):
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(a_request(Faulty(ValueError("too long"), method)))


def test_an_answer_that_json_cannot_say_is_a_fault(monkeypatch):
    processor = Faulty(None, "none")
    monkeypatch.setattr(processor, "perhaps", lambda method, value: {"x": object()} if "post" in method else value)
    with pytest.raises(EngineGenerateError, match="post_process gave what JSON cannot say"):
        asyncio.run(a_request(processor))
