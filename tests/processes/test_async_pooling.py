"""AsyncLLM on a pooling model, its engine core in a process of its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hardpoint import AsyncEngineArgs, AsyncLLM, PoolingParams, SamplingParams
from hardpoint.errors import VLLMValidationError
from hardpoint.types.outputs import PoolingRequestOutput

pytestmark = pytest.mark.server


def test_a_pooling_engine(tiny_llama, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def go():
        args = AsyncEngineArgs(
            model=str(tiny_llama), runner="pooling", max_num_batched_tokens=16, max_num_seqs=4,
            kv_cache_memory_bytes=8 << 20,
        )  # fmt: skip
        engine = AsyncLLM.from_engine_args(args)
        try:
            await checks(engine)
        finally:
            engine.shutdown()

    asyncio.run(go())


async def encode(engine: AsyncLLM, prompt: object, name: str, **params: object) -> PoolingRequestOutput:
    [output] = [output async for output in engine.encode(prompt, PoolingParams(**params), name)]
    return output


async def checks(engine: AsyncLLM) -> None:
    assert await engine.get_supported_tasks() == ("embed", "token_embed")
    ids = list(range(3, 63))
    # Alone, beside others, and in pieces of a step's 16 tokens: the same numbers.
    alone = (await encode(engine, {"prompt_token_ids": ids}, "alone")).outputs.data
    await engine.reset_prefix_cache()
    together = await asyncio.gather(
        *(encode(engine, {"prompt_token_ids": ids[: 60 - 9 * number]}, f"r{number}") for number in range(5))
    )
    np.testing.assert_allclose(together[0].outputs.data, alone, atol=1e-5)
    assert all(output.finished and output.error is None for output in together)
    assert [len(output.prompt_token_ids) for output in together] == [60, 51, 42, 33, 24]
    with pytest.raises(VLLMValidationError, match="task 'classify'"):
        await encode(engine, "x", "wrong task", task="classify")
    with pytest.raises(VLLMValidationError, match="does not generate text"):
        await anext(engine.generate("x", SamplingParams(), "text"))
    # Whoever leaves takes the request along.
    tasks = [asyncio.create_task(encode(engine, {"prompt_token_ids": ids}, f"left{n}")) for n in range(6)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.get_num_unfinished_requests() == 0
    assert (await encode(engine, "The quick", "after")).outputs.data.shape == alone.shape
