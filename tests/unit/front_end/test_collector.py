"""A request's mailbox."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.errors import EngineGenerateError
from hardpoint.front_end.outputs import RequestOutputCollector
from hardpoint.types.outputs import CompletionOutput, RequestOutput
from hardpoint.types.sampling_params import RequestOutputKind


def output(text: str, ids: list[int], index: int = 0, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(index, text, ids, None, None, finish_reason="stop" if finished else None)
    return RequestOutput("r", "p", [1], None, [completion], finished)


def test_deltas_that_were_not_read_are_joined():
    box = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    box.put(output("a", [1]))
    box.put(output("b", [2, 3], finished=True))
    got = box.get_nowait()
    assert (got.outputs[0].text, got.outputs[0].token_ids, got.finished) == ("ab", [1, 2, 3], True)
    assert box.get_nowait() is None


def test_cumulative_outputs_replace_one_another():
    box = RequestOutputCollector(RequestOutputKind.CUMULATIVE, "r")
    box.put(output("a", [1]))
    box.put(output("ab", [1, 2]))
    assert box.get_nowait().outputs[0].text == "ab"


def test_outputs_of_several_indices_stay_apart():
    box = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    box.put(output("a", [1], 0))
    box.put(output("x", [9], 1))
    box.put(output("b", [2], 0))
    assert [one.text for one in box.get_nowait().outputs] == ["ab", "x"]


def test_get_waits_and_raises_what_was_put():
    async def main():
        box = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        asyncio.get_running_loop().call_later(0.01, box.put, output("a", [1]))
        assert (await box.get()).outputs[0].text == "a"
        box.put(EngineGenerateError("broken"))
        box.put(output("late", [1]))
        with pytest.raises(EngineGenerateError, match="broken"):
            await box.get()

    asyncio.run(main())


def test_an_error_comes_after_what_was_made_before_it_and_close_empties():
    box = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    box.put(output("a", [1]))
    box.put(EngineGenerateError("broken"))
    box.put(output("too late", [1]))
    assert box.get_nowait().outputs[0].text == "a"
    with pytest.raises(EngineGenerateError):
        box.get_nowait()
    box.put(output("a", [1]))
    box.close()
    assert box.get_nowait() is None
