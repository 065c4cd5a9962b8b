"""The engine core's loop with a make-believe engine core."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import zmq

from hardpoint.links.codec import Decoder
from hardpoint.links.sockets import SocketFolder, bind_router, connect_dealer
from hardpoint.processes.engine_core import EngineCoreLoop
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType


class Core:
    """Makes an output for each of two front ends in each step, and fails in the fourth."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self) -> None:
        self.steps = 0

    def has_work(self) -> bool:
        return True

    def step(self):
        self.steps += 1
        if self.steps == 4:
            raise RuntimeError("a step failed")
        outputs = [EngineCoreOutput("r", [self.steps])]
        return {client: EngineCoreOutputs(outputs=outputs) for client in (0, 1)}, True


@pytest.fixture
def sockets() -> Iterator[tuple]:
    folder, context = SocketFolder(), zmq.Context()
    address = folder.address("core")
    router = bind_router(context, address)
    yield router, [connect_dealer(context, address, index) for index in (0, 1)]
    context.destroy(linger=0)
    folder.remove()


def test_front_ends_are_told_after_which_output_nothing_comes_any_more(sockets):
    router, clients = sockets
    for client in clients:
        client.send_multipart([EngineCoreRequestType.WAKEUP.value, b""])
    loop = EngineCoreLoop(Core(), router, drain_s=0)
    while len(loop._clients) < 2:
        assert router.poll(5000)
        loop._receive(0)
    loop._wake()  # What a message does.
    with pytest.raises(RuntimeError, match="a step failed"):
        loop.run()
    loop.say_last()
    for client in clients:
        heard = [read(client) for _ in range(5)]
        assert [[output.new_token_ids for output in outputs.outputs] for outputs in heard] == [
            [],
            [[1]],
            [[2]],
            [[3]],
            [],
        ]
        assert [outputs.is_last for outputs in heard] == [False] * 4 + [True]


def read(client) -> EngineCoreOutputs:
    assert client.poll(5000)
    return Decoder(EngineCoreOutputs).decode(client.recv())
