"""We ship no IO processor; the example stands for one, also against the engine's own way through it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from example_plugins import load_example

from hardpoint.front_end.io_processors import BesideTheLoop
from hardpoint.testing import check_io_processor, tiny_vllm_config
from hardpoint.types.outputs import PoolingOutput, PoolingRequestOutput

ROWS = np.array([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]], np.float32)


@pytest.fixture
def kind():
    return load_example("io_processors", "processor").AcmeProcessor


def test_the_example(kind):
    check_io_processor(kind, {"texts": ["a"]}, output_of=lambda prompt: ROWS)


def test_the_example_on_its_way_through_the_server(kind):
    async def run():
        processor = BesideTheLoop(kind(tiny_vllm_config(), None))
        prompts, params = await processor.before({"texts": ["a", "b"]}, "r")
        assert (prompts, params.task) == (["a", "b"], "token_embed")
        outputs = [
            PoolingRequestOutput("r", PoolingOutput(ROWS), [1, 2, 1], num_cached_tokens=0, finished=True)
            for _ in prompts
        ]
        return await processor.after(outputs, "r")

    answer = asyncio.run(run())
    assert [one["dense"] for one in answer] == [pytest.approx([0.6, 0.8])] * 2
    assert answer[0]["sparse"] == pytest.approx({"1": 5.0, "2": 0.0})
