"""AsyncLLM on a real engine core process."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import re
import signal
import time

import psutil
import pytest
from rpc_extension import Extension

from hardpoint import AsyncEngineArgs, AsyncLLM, PoolingParams, SamplingParams
from hardpoint.contracts.stat_logger import StatLoggerBase
from hardpoint.contracts.worker_calls import RemoteCallError
from hardpoint.errors import AdmissionError, CodecError, EngineDeadError, EngineGenerateError, VLLMValidationError
from hardpoint.types.sampling_params import RequestOutputKind
from process_tools import PATIENCE_S, happens, running

EXTENSION = f"{Extension.__module__}.{Extension.__qualname__}"


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["uni", "mp"])
def engine(tiny_llama, runner, request):
    args = AsyncEngineArgs(
        model=str(tiny_llama),
        worker_extension_cls=EXTENSION,
        distributed_executor_backend=request.param,
        kv_cache_memory_bytes=64 << 20,
        max_num_queued_reqs=6,
        enable_log_requests=True,
    )
    engine = AsyncLLM.from_engine_args(args)
    yield engine
    engine.shutdown()


@pytest.fixture
def run(runner, engine):
    yield runner.run
    assert engine.get_num_unfinished_requests() == 0


def greedy(**more) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **more})


def endless() -> SamplingParams:
    return greedy(max_tokens=1000)


async def last(engine, request_id, params, prompt="The quick brown"):
    return [output async for output in engine.generate(prompt, params, request_id)][-1]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_one_line_says_how_a_request_ended(engine, run, caplog, kind):
    async def go():
        await last(engine, "counted", greedy(output_kind=kind, n=2))
        leaving = engine.generate("The quick", endless(), "left")
        await anext(leaving)
        await leaving.aclose()
        with pytest.raises(ValueError, match="too long"):
            await last(engine, "refused", greedy(max_tokens=5), prompt=[1] * 5000)

    with caplog.at_level("INFO", "hardpoint.front_end.request_ends"):
        run(go())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    counted, left, refused = lines
    assert re.fullmatch(r"request counted ended after \d.\d\d s: \d prompt tokens, 24 output tokens, length", counted)
    assert re.fullmatch(r"request left ended after \d.\d\d s: \d prompt tokens, \d+ output tokens, aborted", left)
    assert "request refused ended after" in refused
    assert "VLLMValidationError" in refused


def test_outputs_grow_and_the_last_is_finished(engine, run):
    async def go():
        return [output async for output in engine.generate("The quick", greedy(), "r1")]

    outputs = run(go())
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in outputs][-1]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert len(outputs[-1].outputs[0].token_ids) == 12
    assert outputs[-1].request_id == "r1"
    assert outputs[-1].prompt == "The quick"


def test_deltas_and_the_final_output_say_the_same(engine, run):
    async def go():
        deltas = [o async for o in engine.generate("The quick", greedy(output_kind=RequestOutputKind.DELTA), "r")]
        final = [o async for o in engine.generate("The quick", greedy(output_kind=RequestOutputKind.FINAL_ONLY), "r")]
        return deltas, final

    deltas, [final] = run(go())
    assert "".join(output.outputs[0].text for output in deltas) == final.outputs[0].text
    assert [i for output in deltas for i in output.outputs[0].token_ids] == list(final.outputs[0].token_ids)


def test_n_outputs_of_one_request(engine, run):
    params = greedy(n=3, temperature=1.0, seed=5, output_kind=RequestOutputKind.FINAL_ONLY)
    output = run(last(engine, "n", params))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def test_many_at_once_give_what_each_gives_alone(engine, run):
    prompts = ["The quick", "A server answers", "Once upon", "for number in"]

    async def go():
        alone = [await last(engine, f"alone-{i}", greedy(), prompt) for i, prompt in enumerate(prompts)]
        together = await asyncio.gather(
            *(last(engine, f"together-{i}", greedy(), prompt) for i, prompt in enumerate(prompts))
        )
        return alone, together

    alone, together = run(go())
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in together]


async def idle(engine, within_s=PATIENCE_S):
    """Wait until the engine core itself has no request."""
    deadline = time.monotonic() + within_s
    while any(await engine.engine_core.call_utility_async("get_request_counts")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_a_cancelled_reader_and_a_closed_generator_abort_the_request(engine, run):
    async def go():
        task = asyncio.create_task(last(engine, "cancelled", endless()))
        stream = engine.generate("The quick", endless(), "closed")
        await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()
        await idle(engine)

    run(go())


def test_abort_ends_the_reader_with_what_there_is(engine, run):
    async def go():
        stream = engine.generate("The quick", endless(), "aborted")
        await anext(stream)
        await engine.abort(["aborted", "never seen"])
        output = [output async for output in stream][-1]
        await idle(engine)
        return output

    output = run(go())
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 1000


def test_a_request_that_is_not_acceptable_is_refused_and_others_go_on(engine, run):
    async def go():
        with pytest.raises(VLLMValidationError, match="context length"):
            await last(engine, "long", greedy(), [5] * 2000)
        with pytest.raises(VLLMValidationError, match="streamed input"):
            await last(engine, "streamed", greedy(), engine.generate("x", greedy(), "y"))
        return await last(engine, "fine", greedy())

    assert run(go()).finished


@pytest.mark.parametrize(
    ("request_id", "change"),
    [
        ("number", {"extra_args": {"a": 2**70}}),
        ("half", {"extra_args": {"a": "\ud800"}}),
        ("id-\ud800", {}),
        ("outputs", {"n": 3, "stream_interval": 2**64}),
    ],
)
def test_a_request_that_no_message_can_hold_leaves_nothing_behind(engine, run, request_id, change):
    async def go():
        with pytest.raises(VLLMValidationError, match="request"):
            await last(engine, request_id, greedy(**change))
        assert not engine.output_processor.parent_requests
        await engine.fail_requests(RuntimeError("nobody is there to fail"))
        return await last(engine, "fine", greedy())

    assert run(go()).finished


def test_an_engine_that_has_ended_its_requests_for_good_takes_no_more(engine, run, monkeypatch):
    monkeypatch.setattr(engine, "_closed", None)  # To be undone.

    async def go():
        running = asyncio.create_task(last(engine, "running", greedy(max_tokens=500)))
        while not engine.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        await engine.fail_requests(AdmissionError("the server is shutting down", reason="shutdown"), for_good=True)
        for request in (running, last(engine, "late", greedy())):
            with pytest.raises(AdmissionError, match="shutting down"):
                await request
        assert not engine.get_num_unfinished_requests()

    run(go())


def test_a_reader_that_is_cancelled_while_its_request_is_sent_leaves_nothing_behind(engine, run, monkeypatch):
    send = engine.engine_core.add_request_async

    async def slowly(request):
        await send(request)
        await asyncio.sleep(60)

    async def go():
        monkeypatch.setattr(engine.engine_core, "add_request_async", slowly)
        reader = asyncio.create_task(last(engine, "leaves", endless()))
        await happens(lambda: engine.get_num_unfinished_requests() == 1)
        reader.cancel()
        await asyncio.wait([reader])
        assert engine.get_num_unfinished_requests() == 0
        monkeypatch.undo()
        return await last(engine, "fine", greedy())

    assert run(go()).finished


def test_past_the_queue_limit_requests_are_turned_away(engine, run):
    async def go():
        engine.check_admission(6)
        with pytest.raises(AdmissionError) as refused:
            engine.check_admission(7)
        assert refused.value.reason == "max_num_queued_reqs"
        running = [asyncio.create_task(last(engine, f"r{i}", endless())) for i in range(6)]
        await happens(lambda: engine.get_num_unfinished_requests() == 6)
        with pytest.raises(AdmissionError, match="6 requests are in flight"):
            await last(engine, "one too many", greedy())
        await engine.abort([f"r{i}" for i in range(6)])
        await asyncio.gather(*running)
        return await last(engine, "again", greedy())

    assert run(go()).finished


def test_a_request_past_its_time_limit_ends_with_an_error(engine, run, monkeypatch):
    monkeypatch.setattr(engine.vllm_config.scheduler_config, "request_timeout", 0.2)

    async def go():
        with pytest.raises(EngineGenerateError, match="time limit"):
            await last(engine, "late", endless())
        await idle(engine)
        return await last(engine, "short", greedy(max_tokens=1))

    assert run(go()).finished


@pytest.mark.parametrize(
    ("method", "kind", "text"),
    [
        ("boom", RemoteCallError, "Odd: odd one two"),
        ("weird", CodecError, "function"),
        ("no_such_method", NotImplementedError, "no_such_method"),
        (3, TypeError, "name or a callable"),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_an_error_of_a_worker_method_reaches_the_caller_alone(engine, run, method, kind, text, busy):
    async def go():
        stream = asyncio.create_task(last(engine, "stream", greedy(max_tokens=60))) if busy else None
        with pytest.raises(kind, match=text):
            await engine.collective_rpc(method, timeout=60)
        if stream is not None:
            assert len((await stream).outputs[0].token_ids) == 60
        assert await engine.collective_rpc("ok", args=(5,)) == [{"rank": 0, "value": 5, "model": "LlamaForCausalLM"}]

    run(go())


def test_a_slow_worker_method_is_given_up_and_streams_go_on(engine, run):
    async def go():
        streams = [asyncio.create_task(last(engine, f"s{i}", greedy(max_tokens=60))) for i in range(4)]
        await happens(lambda: engine.get_num_unfinished_requests() == 4)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="slow"):
            await engine.collective_rpc("slow", timeout=1)
        assert 0.9 < time.monotonic() - started < 30
        for stream in streams:
            assert len((await stream).outputs[0].token_ids) == 60

    run(go())


def test_a_large_result_arrives_whole(engine, run):
    [result] = run(engine.collective_rpc("big"))
    assert result.nbytes == 50_000_000
    assert result.all()


def test_pausing_holds_new_requests_until_resumed(engine, run):
    async def go():
        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        task = asyncio.create_task(last(engine, "held", greedy()))
        await asyncio.sleep(0.2)
        assert not task.done()
        await engine.resume_generation()
        assert not await engine.is_paused()
        return await task

    assert run(go()).finished


def test_waiting_for_running_requests_does_not_hold_up_other_calls(engine, run):
    async def go():
        running = engine.generate("The quick brown", greedy(max_tokens=300), "running")
        await anext(running)
        pausing = asyncio.create_task(engine.pause_generation(mode="wait"))
        assert await engine.collective_rpc("ok")
        await pausing
        assert [output async for output in running][-1].outputs[0].finish_reason == "length"
        await engine.resume_generation()

    run(go())


def test_what_is_not_there_is_refused_by_name(engine, run):
    async def go():
        with pytest.raises(NotImplementedError, match="sleep mode"):
            await engine.sleep()
        with pytest.raises(ValueError, match="generates text and does not pool"):
            await anext(engine.encode("x", PoolingParams(), "p"))
        with pytest.raises(NotImplementedError, match="update_weights"):
            await engine.update_weights(None)
        with pytest.raises(ValueError, match="profiler"):
            await engine.start_profile()
        assert await engine.is_sleeping() is False

    run(go())


def test_state_and_calls_of_a_healthy_engine(engine, run):
    async def go():
        await engine.check_health()
        assert engine.is_running
        assert not engine.errored
        assert await engine.get_supported_tasks() == ("generate",)
        assert await engine.reset_prefix_cache() is True
        await engine.do_log_stats()
        assert engine.get_tokenizer().decode(engine.get_tokenizer().encode("The fox")) == "The fox"
        pids = {entry["pid"] for entry in await engine.get_ledger()}
        workers = psutil.Process(engine.engine_core.process.child.pid).children()
        assert len(workers) == (1 if engine.vllm_config.parallel_config.distributed_executor_backend == "mp" else 0)
        assert {os.getpid(), engine.engine_core.process.child.pid, *(worker.pid for worker in workers)} <= pids

    run(go())


def test_what_the_engine_core_cannot_read_is_ignored(engine, run):
    async def go():
        assert not await engine.is_paused()
        socket = engine.engine_core._socket
        for frames in ([b"\x7f", b"unknown kind"], [b"\x00"], [b"\x00", b"x", b"y"], [b"\x00", b"\xc1"],
                       [b"\x01", b"\x05"], [b"\x03", b"\x93\x01\x02\x03"], [b"\x04", b""]):  # fmt: skip
            await socket.send_multipart(frames)
        with pytest.raises(NotImplementedError, match="_step"):
            await engine.engine_core.call_utility_async("_step")
        with pytest.raises(TypeError):
            await engine.engine_core.call_utility_async("check_health", "too", "many")
        return await last(engine, "fine", greedy())

    assert run(go()).finished


def test_a_request_the_engine_core_refuses_ends_alone(engine, run):
    async def go():
        _, request = engine.input_processor.process_inputs("odd", "The", greedy())
        request.prompt_token_ids = None
        with pytest.raises(EngineGenerateError, match="no prompt"):
            await last(engine, "odd", greedy(), request)
        return await last(engine, "fine", greedy())

    assert run(go()).finished


def test_the_death_of_the_engine_core_reaches_everyone(tiny_llama):
    async def go():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_llama), kv_cache_memory_bytes=64 << 20))
        child = engine.engine_core.process.child
        reading = asyncio.create_task(last(engine, "r", endless()))
        calling = asyncio.create_task(engine.collective_rpc("get_model_inspection"))
        assert "LlamaForCausalLM" in (await calling)[0]
        waiting = asyncio.create_task(engine.wait_for_death())
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            await reading
        await waiting
        assert engine.errored
        assert not engine.is_running
        for refused in (engine.check_health(), engine.collective_rpc("ok"), last(engine, "new", greedy())):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await refused
        engine.shutdown()
        engine.shutdown()

    asyncio.run(go())


def test_an_engine_that_is_dropped_ends_its_engine_core(tiny_llama):
    async def go():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(tiny_llama), kv_cache_memory_bytes=64 << 20))
        await last(engine, "r", greedy())
        pid = engine.engine_core.process.child.pid
        del engine
        # The task that reads outputs lets go of the engine while it waits.
        for _ in range(1200):
            gc.collect()
            await asyncio.sleep(0.05)
            if not running(pid):
                return True
        return False

    assert asyncio.run(go())


class Counting(StatLoggerBase):
    """Counts tokens, and how often it was asked to log."""

    tokens = logs = 0

    def __init__(self, vllm_config, engine_index=0):
        pass

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        if iteration_stats is not None:
            Counting.tokens += iteration_stats.num_generation_tokens

    def log(self):
        Counting.logs += 1

    def log_engine_initialized(self):
        pass


def test_a_script_that_serves_nothing_has_its_stat_loggers_log_too(tiny_llama, monkeypatch):
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "0.1")

    async def go():
        args = AsyncEngineArgs(model=str(tiny_llama), kv_cache_memory_bytes=64 << 20)
        engine = AsyncLLM.from_engine_args(args, stat_loggers=[Counting])
        output = await last(engine, "r", greedy())
        await happens(lambda: Counting.logs >= 2)
        engine.shutdown()
        return len(output.outputs[0].token_ids)

    assert asyncio.run(go()) == Counting.tokens
    assert Counting.logs >= 2
