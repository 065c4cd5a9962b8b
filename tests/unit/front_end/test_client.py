"""Reading an engine core's outputs: a make-believe engine core at the other end of the socket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from hardpoint.errors import EngineDeadError
from hardpoint.front_end import client as client_module
from hardpoint.front_end.client import AsyncEngineCoreClient, SyncEngineCoreClient
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.turns import Turn
from hardpoint.links.codec import Encoder
from hardpoint.links.sockets import SocketFolder, bind_router
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs, Ready

CLIENT = b"client-0"


class Handle(EngineHandle):
    """An engine core that only its test makes speak and fail."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def begin(self, vllm_config, executor_class=None, log_stats=True):
        pass

    def wait_ready(self) -> Ready:
        raise NotImplementedError

    def connected(self):
        pass

    def shutdown(self, timeout_s=None):
        self._stop()

    def abandon(self):
        self._stop()


class Core:
    """The other end of the socket."""

    def __init__(self) -> None:
        self._folder = SocketFolder()
        self.handle = Handle(self._folder.address("core"))
        self._context = zmq.Context()
        self._router = bind_router(self._context, self.handle.address)
        self._encoder = Encoder()

    def connect(self, make: Callable):
        """A client that `make` builds from the handle; its greeting is answered meanwhile."""
        greeted = threading.Thread(target=self._greet)
        greeted.start()
        client = make(self.handle)
        greeted.join()
        return client

    def _greet(self) -> None:
        self._router.recv_multipart()
        self._say(EngineCoreOutputs())

    def say(self, count: int) -> None:
        for number in range(count):
            self._say(EngineCoreOutputs(outputs=[EngineCoreOutput("r", [number])]))

    def say_last(self) -> None:
        self._say(EngineCoreOutputs(is_last=True))

    def _say(self, outputs: EngineCoreOutputs) -> None:
        self._router.send_multipart([CLIENT, self._encoder.encode(outputs)])

    def fail(self) -> None:
        self.handle.fail(EngineDeadError("it has ended"))

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.remove()


@pytest.fixture
def core() -> Iterator[Core]:
    core = Core()
    yield core
    core.close()


class NotingQueue(asyncio.Queue):
    """Notes in which turn of the event loop each item comes."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.turns: list[int] = []

    def put_nowait(self, item) -> None:
        self.turns.append(self.turn)
        super().put_nowait(item)

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def test_others_have_their_turn_while_outputs_pour_in(core, monkeypatch):
    monkeypatch.setattr(client_module, "Turn", lambda: Turn(0.0))
    queue = NotingQueue()
    client = core.connect(lambda handle: AsyncEngineCoreClient(handle, 0, queue))
    core.say(300)
    time.sleep(0.3)  # Everything has arrived and can be read without waiting.

    async def go() -> None:
        counting = asyncio.create_task(queue.count_turns())
        client.start()
        for _ in range(300):
            await client.get_output_async()
        counting.cancel()
        client.shutdown()

    asyncio.run(asyncio.wait_for(go(), 30))
    assert len(set(queue.turns[:300])) == 300


def test_a_turn_lasts_as_long_as_it_was_given():
    async def turns_in(length_s: float) -> int:
        queue, turn = NotingQueue(), Turn(length_s)
        counting = asyncio.create_task(queue.count_turns())
        for _ in range(50):
            await turn.over()
        counting.cancel()
        return queue.turn

    assert asyncio.run(turns_in(0.0)) >= 49
    assert asyncio.run(turns_in(3600.0)) == 0


def read_to_the_end(client: AsyncEngineCoreClient, core: Core, before: Callable[[], None]) -> list[int]:
    """The tokens that come before the error, when `before` keeps the event loop from reading them at once."""

    async def go() -> list[int]:
        client.start()
        await asyncio.sleep(0)
        before()
        tokens = []
        try:
            while True:
                tokens += (await client.get_output_async()).outputs[0].new_token_ids
        except EngineDeadError:
            return tokens
        finally:
            client.shutdown()

    return asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("is_told", [True, False])
def test_outputs_come_before_the_death_however_busy_the_event_loop_is(core, is_told):
    client = core.connect(AsyncEngineCoreClient)

    def die() -> None:
        core.say(400)
        if is_told:
            core.say_last()
        core.fail()
        time.sleep(0.6)  # Longer than any silence that would be taken for the end.

    assert read_to_the_end(client, core, die) == list(range(400))


def test_a_last_word_is_waited_for_no_longer_than_it_takes(core, monkeypatch):
    monkeypatch.setattr(client_module, "_LAST_OUTPUTS_S", 3600.0)
    client = core.connect(AsyncEngineCoreClient)

    def die() -> None:
        core.fail()
        core.say(3)
        core.say_last()

    assert read_to_the_end(client, core, die) == [0, 1, 2]


def test_a_call_that_waits_fails_with_the_engine_core(core):
    client = core.connect(AsyncEngineCoreClient)

    async def go() -> None:
        call = asyncio.create_task(client.call_utility_async("anything"))
        await asyncio.sleep(0.05)
        core.say_last()
        core.fail()
        try:
            with pytest.raises(EngineDeadError, match="it has ended"):
                await call
        finally:
            client.shutdown()

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("is_told", [True, False])
def test_plain_code_gets_the_outputs_before_the_death_too(core, is_told):
    client = core.connect(SyncEngineCoreClient)
    core.say(5)
    if is_told:
        core.say_last()
    threading.Timer(0.1, core.fail).start()
    tokens = [client.get_output().outputs[0].new_token_ids for _ in range(5)]
    with pytest.raises(EngineDeadError, match="it has ended"):
        client.get_output()
    client.shutdown()
    assert tokens == [[token] for token in range(5)]
