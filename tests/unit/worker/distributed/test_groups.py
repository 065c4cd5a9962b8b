"""What ranks exchange, between two real processes, and the communicator that the platform names."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

RANK = """
import json, sys
import torch
from hardpoint import platforms
from hardpoint.contracts.device_communicator import DeviceCommunicatorBase
from hardpoint.worker.distributed import parallel_state as state
from hardpoint.worker.distributed.communicators import CpuCommunicator

MADE = []

class Watched(CpuCommunicator):
    def __init__(self, **named):
        MADE.append(sorted(named))
        super().__init__(**named)

platform = type(platforms.current_platform)
platform.get_device_communicator_cls = classmethod(lambda cls: "rank_for_test.Watched")
sys.modules["rank_for_test"] = sys.modules["__main__"]

rank, address = int(sys.argv[1]), sys.argv[2]
state.init_distributed_environment(2, rank, address, rank, "gloo")
state.initialize_model_parallel(2, 1)
tp = state.get_tp_group()
x = torch.arange(6.0).view(2, 3) + 10 * rank
found = {
    "made": MADE,
    "place": [tp.rank, tp.rank_in_group, tp.is_first_rank, tp.is_last_rank, tp.next_rank, tp.prev_rank],
    "pp": [state.get_pp_group().world_size, state.get_pp_group().is_last_rank],
    "all_reduce": state.tensor_model_parallel_all_reduce(x.clone()).tolist(),
    "all_gather": state.tensor_model_parallel_all_gather(x).tolist(),
    "all_gather 0": tp.all_gather(x, 0).tolist(),
    "reduce_scatter": tp.reduce_scatter(x, 0).tolist(),
    "gather": [part.tolist() if part is not None else None for part in [state.tensor_model_parallel_gather(x, 1)]],
    "broadcast": tp.broadcast(x.clone(), 1).tolist(),
    "object": tp.broadcast_object({"rank": rank, "set": {1, 2}}, 1),
    "objects": tp.all_gather_object(rank),
}
base = DeviceCommunicatorBase(tp.cpu_group)
found["base"] = base.all_gather(x, 0).tolist()
if rank == 0:
    tp.send_object([1, "two"], 1)
    tp.send(x, 1)
    tp.send_tensor_dict({"hidden": x, "half": x.half(), "step": 7})
    tp.send_tensor_dict({"hidden": x + 1})
else:
    found["received"] = [tp.recv_object(0), tp.recv(x.shape, x.dtype, 0).tolist()]
    first, second = tp.recv_tensor_dict(), tp.recv_tensor_dict()
    found["dict"] = [first["hidden"].tolist(), str(first["half"].dtype), first["step"], second["hidden"].tolist()]
shared = tp.broadcast_tensor_dict({"x": x, "n": 3} if rank == 0 else None)
found["shared"] = [shared["x"].tolist(), shared["n"]]
tp.barrier()
print("FOUND", json.dumps(found, default=sorted))
state.destroy_model_parallel()
state.destroy_distributed_environment()
"""
X = [[[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from hardpoint.engine_core.executors.addresses import MeetingPoint

    script = tmp_path_factory.mktemp("ranks") / "rank.py"
    script.write_text(RANK)
    point = MeetingPoint()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), point.address],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in ranks]
    point.release()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    return [json.loads(out.partition("FOUND")[2]) for out, _ in outputs]


def test_each_knows_its_place(found):
    assert [one["place"] for one in found] == [[0, 0, True, False, 1, 1], [1, 1, False, True, 0, 0]]
    assert [one["pp"] for one in found] == [[1, True]] * 2


def test_the_platforms_communicator_is_made_once_per_group_of_several(found):
    """Not for the world, which exchanges no tensors, and not for groups of one."""
    assert [one["made"] for one in found] == [[["cpu_group", "device", "device_group", "unique_name"]]] * 2


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("all_reduce", [[10, 12, 14], [16, 18, 20]], None),
        ("all_gather", [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]], None),
        ("all_gather 0", [*X[0], *X[1]], None),
        ("base", [*X[0], *X[1]], None),
        ("reduce_scatter", [[10, 12, 14]], [[16, 18, 20]]),
        ("gather", [None], [[[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]]),
        ("broadcast", X[1], None),
        ("object", {"rank": 1, "set": [1, 2]}, None),
        ("objects", [0, 1], None),
        ("shared", [X[0], 3], None),
    ],
)
def test_what_is_exchanged(found, what, first, second):
    assert found[0][what] == first
    assert found[1][what] == (first if second is None else second)


def test_what_is_sent_arrives_in_order(found):
    assert found[1]["received"] == [[1, "two"], X[0]]
    assert found[1]["dict"] == [X[0], "torch.float16", 7, [[1, 2, 3], [4, 5, 6]]]
