"""Workers as Ray actors on a cluster of two nodes, made on this machine by Ray's own test utilities."""

from __future__ import annotations

import os
import signal
import warnings

import pytest

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.executor import Executor
from hardpoint.engine_core.step import EngineCore
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from process_tools import ended, wait_until

# Ray leaves sockets and log files to the garbage collector, and warns of its own defaults.
pytestmark = [
    pytest.mark.server,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_MEMORY = 80 << 20


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one processor each, and RAY_ADDRESS that leads to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": _MEMORY, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        made.add_node(num_cpus=1, object_store_memory=_MEMORY)
    before, os.environ["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS"), made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


def make_core(model, **arguments) -> EngineCore:
    given = {"max_model_len": 128, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32", **arguments}
    config = EngineArgs(model=str(model), **given).create_engine_config()
    return EngineCore(config, Executor.get_class(config), False)


def generate(core: EngineCore) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    core.add_request(EngineCoreRequest("r", list(range(10, 30)), None, params, None, 0.0, None, None, None))
    batches = []
    while core.has_work():
        batches += core.step()[0].values()
    return [token for batch in batches for output in batch.outputs for token in output.new_token_ids]


@pytest.fixture(scope="module")
def ranks(cluster, tiny_llama):
    core = make_core(tiny_llama, tensor_parallel_size=2, distributed_executor_backend="ray")
    yield core
    core.shutdown()


def test_two_nodes_give_the_tokens_of_one_worker(ranks, tiny_llama):
    executor = ranks.model_executor
    nodes = {node for node, _ in executor._ray.get([actor.place.remote() for actor in executor._actors])}
    assert len(nodes) == 2
    alone = make_core(tiny_llama)
    assert generate(ranks) == generate(alone)
    alone.shutdown()


def test_what_a_worker_raises_reaches_the_caller(ranks):
    with pytest.raises(NotImplementedError, match="'no_such_method' is not implemented"):
        ranks.collective_rpc("no_such_method")


def test_more_workers_than_there_is_room_for_are_refused_and_hold_no_place(ranks, tiny_llama, monkeypatch):
    monkeypatch.setattr("hardpoint.engine_core.executors.ray_actors._PLACING_S", 0.5)
    with pytest.raises(ConfigError, match=r"no room for 4 workers of \{'CPU': 1.0\}"):
        make_core(tiny_llama, tensor_parallel_size=4, distributed_executor_backend="ray")
    groups = ranks.model_executor._ray.util.placement_group_table().values()
    assert sorted(group["state"] for group in groups) == ["CREATED", "REMOVED"]


def test_a_worker_that_dies_is_reported_and_the_others_end(ranks):
    """The last test with these workers. Each answers for itself: this process knows those of other engines too."""
    first, second = (entries[0]["pid"] for entries in ranks.collective_rpc("export_ledger"))
    assert len({first, second, os.getpid()}) == 3
    died = []
    ranks.model_executor.register_failure_callback(lambda: died.append(True))
    os.kill(second, signal.SIGKILL)
    assert wait_until(lambda: bool(died))
    with pytest.raises(EngineDeadError, match="on Ray has ended"):
        ranks.check_health()
    ranks.shutdown()
    assert ended(first)
