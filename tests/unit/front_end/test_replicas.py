"""One client over several engine cores: where requests, aborts and calls go. The engine cores are fakes."""

from __future__ import annotations

import asyncio

import pytest

from hardpoint.config.engine_args import EngineArgs
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.front_end import replicas
from hardpoint.front_end.async_llm import AsyncLLM
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.llm_engine import LLMEngine
from hardpoint.front_end.replicas import EngineReplicas, ReplicaClient, connect, merged
from hardpoint.types.finish import FinishReason
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Ready
from hardpoint.types.stats import SchedulerStats


class Handle(EngineHandle):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.calls = index, []

    def begin(self, vllm_config, executor_class=None, log_stats=True):
        self.calls.append("begin")

    def wait_ready(self) -> Ready:
        return Ready(self.index, 100 + self.index, 1600, 512 - self.index, 16, ["generate"], [{"pid": self.index}])

    def connected(self):
        self.calls.append("connected")

    def shutdown(self, timeout_s=None):
        self.calls.append("shutdown")

    def abandon(self):
        self.calls.append("abandon")


class Core:
    """Stands for `AsyncEngineCoreClient`."""

    def __init__(self, process, client_index, outputs) -> None:
        self.index, self.outputs = process.index, outputs
        self.added, self.aborted, self.results = [], [], {}

    def start(self):
        pass

    async def add_request_async(self, request):
        self.added.append(request.request_id)

    async def abort_requests_async(self, ids):
        self.aborted += ids

    async def call_utility_async(self, method, *args, timeout_s=None, **kwargs):
        result = self.results[method]
        if isinstance(result, Exception):
            raise result
        return result

    def shutdown(self, timeout_s=None):
        pass

    def tell(self, ended=(), running=0, waiting=0):
        outputs = [EngineCoreOutput(name, [], finish_reason=FinishReason.STOP) for name in ended]
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)
        self.outputs.put_nowait(EngineCoreOutputs(self.index, outputs, stats))


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(replicas, "AsyncEngineCoreClient", Core)
    return ReplicaClient(EngineReplicas([Handle(0), Handle(1)]))


def request(name: str, rank: int | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1], None, None, None, 0.0, None, None, rank)


def add(client, *names: str, rank: int | None = None) -> None:
    for name in names:
        asyncio.run(client.add_request_async(request(name, rank)))


def added(client) -> list[list[str]]:
    return [core.added for core in client._clients]


def test_requests_are_spread_evenly(client):
    add(client, "a", "b", "c", "d")
    assert added(client) == [["a", "c"], ["b", "d"]]


def test_a_request_goes_where_it_says(client):
    add(client, "a", "b", "c", rank=1)
    add(client, "d")
    assert added(client) == [["d"], ["a", "b", "c"]]


def test_an_ended_request_makes_room(client):
    add(client, "a", "b", "c")
    client._clients[0].tell(ended=["a", "c"])
    asyncio.run(client.get_output_async())
    add(client, "d", "e", "f")
    assert added(client) == [["a", "c", "d", "f"], ["b", "e"]]


def test_requests_of_other_front_ends_count(client):
    client._clients[0].tell(running=2, waiting=1)
    asyncio.run(client.get_output_async())
    add(client, "a", "b", "c")
    assert added(client) == [[], ["a", "b", "c"]]


def test_what_was_told_long_ago_counts_no_more(client, monkeypatch):
    client._clients[0].tell(running=5)
    asyncio.run(client.get_output_async())
    monkeypatch.setattr(replicas, "_TOLD_LATELY_S", 0.0)
    add(client, "a", "b")
    assert added(client) == [["a"], ["b"]]


def test_an_abort_follows_its_request(client):
    add(client, "a", "b", "c")
    asyncio.run(client.abort_requests_async(["b", "a", "unknown"]))
    assert [core.aborted for core in client._clients] == [["a"], ["b"]]
    add(client, "d")
    assert added(client)[1] == ["b", "d"]


def test_a_request_that_could_not_be_sent_does_not_count(client, monkeypatch):
    async def fail(request):
        raise EngineDeadError("gone")

    monkeypatch.setattr(client._clients[0], "add_request_async", fail)
    with pytest.raises(EngineDeadError):
        add(client, "a", rank=0)
    assert (client._loads[0].own, client._places) == (0, {})


@pytest.mark.parametrize(
    ("method", "results", "together"),
    [
        ("collective_rpc", ([1, 2], [3, 4]), [1, 2, 3, 4]),
        ("get_ledger", ([{"pid": 1}], [{"pid": 2}]), [{"pid": 1}, {"pid": 2}]),
        ("reset_prefix_cache", (True, False), False),
        ("reset_prefix_cache", (True, True), True),
        ("get_request_counts", ((1, 2), (3, 0)), (4, 2)),
        ("list_loras", ({1}, {1}), {1}),
        ("pause_scheduler", (None, None), None),
    ],
)
def test_a_call_goes_to_all_and_has_one_result(client, method, results, together):
    for core, result in zip(client._clients, results, strict=True):
        core.results[method] = result
    assert asyncio.run(client.call_utility_async(method)) == together


def test_a_call_that_fails_in_one_fails(client):
    client._clients[0].results["sleep"] = None
    client._clients[1].results["sleep"] = NotImplementedError("sleep")
    with pytest.raises(NotImplementedError):
        asyncio.run(client.call_utility_async("sleep"))


def test_what_holds_for_all_is_the_least(client):
    ready = merged([Handle(0).wait_ready(), Handle(1).wait_ready()])
    assert (ready.num_gpu_blocks, ready.max_model_len, ready.ledger) == (100, 511, [{"pid": 0}, {"pid": 1}])


def test_all_begin_and_end_and_the_first_that_dies_is_the_end_of_all():
    engine = EngineReplicas([Handle(0), Handle(1)])
    engine.begin(None)
    engine.wait_ready()
    engine.connected()
    heard = []

    class Listener:
        def died(self, error):
            heard.append(error)

    listener = Listener()
    engine.on_death(listener.died)
    engine.replicas[1].fail(EngineDeadError("the second one"))
    assert [error.what for error in heard] == ["the second one"]
    with pytest.raises(EngineDeadError, match="the second one"):
        engine.check()
    engine.shutdown()
    assert [one.calls for one in engine.replicas] == [["begin", "connected", "shutdown"]] * 2


def test_one_engine_core_needs_no_balancing(monkeypatch):
    monkeypatch.setattr(replicas, "AsyncEngineCoreClient", lambda process, index: (process, index))
    handle = Handle(0)
    assert connect(handle, 3) == (handle, 3)


def test_who_has_one_engine_core_refuses_replicas(make_tiny_llama):
    config = EngineArgs(model=str(make_tiny_llama()), data_parallel_size=2).create_engine_config()
    assert (config.parallel_config.data_parallel_size_local, config.parallel_config.distributed_executor_backend) == (
        2,
        "mp",
    )
    with pytest.raises(ConfigError, match=r"replicas serve `hardpoint serve` and AsyncLLM, not LLM"):
        LLMEngine.from_vllm_config(config)


def test_a_server_does_not_run_the_ranks_of_a_script(make_tiny_llama):
    model = str(make_tiny_llama())
    args = EngineArgs(model=model, tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    handle = Handle(0)
    with pytest.raises(ConfigError, match="external_launcher executor runs the ranks of a script"):
        AsyncLLM.from_vllm_config(args.create_engine_config(), engine_process=handle)
    assert handle.calls == ["abandon"]
