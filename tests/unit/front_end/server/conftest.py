"""A scripted engine behind the real application: no model, no process, no socket."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers

from hardpoint.config.sections import StructuredOutputsConfig
from hardpoint.contracts.engine_client import EngineClient
from hardpoint.errors import EngineDeadError
from hardpoint.extensions.ledger import ledger
from hardpoint.front_end.inputs import InputProcessor
from hardpoint.front_end.outputs import OutputProcessor, RequestOutputCollector
from hardpoint.front_end.sequences import sequences
from hardpoint.front_end.server.app import build_app, init_app_state
from hardpoint.front_end.tokenizers.tokenizer import Tokenizer, TokenizerParts
from hardpoint.types.finish import FinishReason
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreOutput
from process_tools import PATIENCE_S

MODEL = "tiny"
CONTEXT = 64
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = "<|end|>"


def _tokenizer() -> Tokenizer:
    """Byte-level, one token per byte plus a few words: ids and texts are easy to say by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġworld", "Ġthe", "hello", "Ġstop"]
    merges: list[tuple[str, str]] = []
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    for word in words:
        done = word[0]
        for letter in word[1:]:
            merges.append((done, letter))
            done += letter
            vocab.setdefault(done, len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(
        TokenizerParts(
            backend,
            "tiny",
            special={"eos_token": EOS},
            chat_templates={"default": TEMPLATE},
            config={"made": "by hand"},
        )
    )


def _vllm_config(tokenizer: Tokenizer, **changes: Any) -> Any:
    model = SimpleNamespace(
        model=MODEL, served_model_name=MODEL, max_model_len=CONTEXT, skip_tokenizer_init=False,
        max_logprobs=20, revision=None, dtype="float32", quantization=None, hf_config=SimpleNamespace(),
        logits_processors=None, get_vocab_size=lambda: len(tokenizer), get_diff_sampling_param=dict,
        try_get_generation_config=dict, runner_type="generate",
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(policy="fcfs", stream_interval=1),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        structured_outputs_config=StructuredOutputsConfig(),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
    )
    for path, value in changes.items():
        section, _, name = path.partition("__")
        setattr(getattr(config, section), name, value)
    return config


class ScriptedEngine(EngineClient):
    """Answers every request with `script(prompt ids, n-th output)`, one token per `pace_s`.

    An id of the script may be an exception: it is put in the output's place. `aborted` and `requests` tell
    what reached the engine.
    """

    def __init__(self, tokenizer: Tokenizer, script: Callable[[list[int], int], list[Any]], **config: Any) -> None:
        self.tokenizer = tokenizer
        self.vllm_config = _vllm_config(tokenizer, **config)
        self.model_config = self.vllm_config.model_config
        self.input_processor = InputProcessor(self.vllm_config, tokenizer, logits_processors=[])
        self.renderer = self.input_processor
        self.outputs = OutputProcessor(tokenizer, log_stats=True)
        self.script = script
        self.pace_s = 0.0
        self.requests: list[Any] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[Any, ...]] = []
        self.death: Exception | None = None
        self.refusal: Exception | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def next_step(self) -> None:
        """Wait for the time of the next token; a test may put its own wait here."""
        await asyncio.sleep(self.pace_s)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def is_running(self) -> bool:
        return self.death is None

    @property
    def is_stopped(self) -> bool:
        return self.death is not None

    @property
    def errored(self) -> bool:
        return self.death is not None

    @property
    def dead_error(self) -> BaseException:
        return self.death or EngineDeadError()

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self.calls.append(("check_admission", n, request_id))
        if self.refusal is not None:
            raise self.refusal

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **given: Any
    ) -> AsyncGenerator[Any, None]:
        await self.check_health()
        text = given.pop("prompt_text", None)
        known = {name: given[name] for name in ("trace_headers", "priority", "data_parallel_rank", "session_id")}
        made, request = self.input_processor.process_inputs(request_id, prompt, sampling_params, **known)
        self.requests.append(request)
        queue = RequestOutputCollector(request.params.output_kind, request.request_id)
        children = sequences(request)
        for child, parent, index in children:
            self.outputs.add_request(child, text or made, parent, index, queue)
        task = self._tasks[request_id] = asyncio.create_task(
            self._feed([(child, index) for child, _, index in children], queue)
        )
        try:
            finished = False
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            await self.abort(request_id)
            raise
        finally:
            task.cancel()

    async def _feed(self, children: list[tuple[Any, int]], queue: RequestOutputCollector) -> None:
        scripts = [self.script(child.prompt_token_ids, index) for child, index in children]
        running = set(range(len(children)))
        for step in itertools.count():
            await self.next_step()
            for i in sorted(running):
                child = children[i][0]
                if isinstance(scripts[i][step], Exception):
                    queue.put(scripts[i][step])
                    return
                output = self._output(child, scripts[i], step)
                result = self.outputs.process_outputs([output], 0.0)
                if output.finished or result.reqs_to_abort:
                    running.discard(i)
            if not running:
                return

    def _output(self, request: Any, script: list[int], step: int) -> EngineCoreOutput:
        params, token = request.sampling_params, script[step]
        reason, stop = None, None
        ends = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
        if token in (ends or ()):
            reason, stop = FinishReason.STOP, token if token in (params.stop_token_ids or ()) else None
        elif step + 1 >= params.max_tokens or step + 1 >= len(script):
            reason = FinishReason.LENGTH
        prompt_rows = None
        if step == 0 and params.prompt_logprobs is not None:
            prompt_rows = self._rows(request.prompt_token_ids[1:], params.prompt_logprobs)
        rows = self._rows([token], params.logprobs) if params.logprobs is not None else None
        return EngineCoreOutput(request.request_id, [token], rows, prompt_rows, finish_reason=reason, stop_reason=stop)

    def _rows(self, ids: list[int], top: int) -> LogprobsLists:
        """The chosen token is the second best everywhere: -1.0, rank 2; id 0 is best, -0.5, then 1, 2, ..."""
        others = [[i for i in range(top + 1) if i != token] for token in ids]
        best = [[token, *[*row[:1], token, *row[1:]][:top]] for token, row in zip(ids, others, strict=True)]
        values = [[-1.0, *([-0.5, -1.0] + [-2.0 - i for i in range(top)])[:top]] for _ in ids]
        return LogprobsLists(
            np.array(best, dtype=np.int32).reshape(len(ids), top + 1),
            np.array(values, dtype=np.float32).reshape(len(ids), top + 1),
            np.full(len(ids), 2, dtype=np.int32),
        )

    async def encode(self, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
        raise NotImplementedError("encode")
        yield

    async def abort(self, request_id: Any) -> None:
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self.aborted += ids
        for one in ids:
            self._tasks[one].cancel()
        self.outputs.abort_requests(ids)

    async def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    async def do_log_stats(self) -> None:
        pass

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(("reset_prefix_cache", reset_running_requests, reset_connector))
        return True

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(("collective_rpc", method, timeout, args, kwargs))
        return [{"rank": 0}, 7, None]

    def shutdown(self, timeout: float | None = None) -> None:
        pass


class Server:
    """One application with its engine, called in this event loop through ASGI."""

    def __init__(self, app: Any, engine: ScriptedEngine) -> None:
        self.app = app
        self.engine = engine
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def complete(self, **body: Any) -> Any:
        answer = await self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chat(self, text: str = "hi", **body: Any) -> Any:
        body.setdefault("messages", [{"role": "user", "content": text}])
        answer = await self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The chunks of a stream; `[DONE]` must come last and only there."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return _tokenizer()


@pytest.fixture
def ids(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Text to ids."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def make_server(tokenizer: Tokenizer) -> Callable[..., Any]:
    """Build a server: flags as keywords, `script` as a text or a function, `config` for the engine's config."""

    async def make(
        script: str | Callable[[list[int], int], list[Any]] = "hello world" + EOS,
        config: dict[str, Any] | None = None,
        **flags: Any,
    ) -> Server:
        text = script
        if isinstance(text, str):
            script = lambda prompt, index: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        engine = ScriptedEngine(tokenizer, script, **(config or {}))
        args = argparse.Namespace(**{"model": MODEL, "served_model_name": [MODEL, "alias"], **flags})
        app = build_app(args, ("generate",))
        await init_app_state(engine, app.state, args)
        return Server(app, engine)

    return make


@pytest.fixture
def run() -> Iterator[Callable[[Any], Any]]:
    """Run a coroutine on a loop of this test; nothing it started may be left running."""

    async def alone(work: Any) -> Any:
        result = await work
        others = lambda: asyncio.all_tasks() - {asyncio.current_task()}  # noqa: E731
        ends = time.monotonic() + PATIENCE_S
        while others():
            assert time.monotonic() < ends, f"tasks are left: {others()}"
            await asyncio.sleep(0.01)
        return result

    return lambda work: asyncio.run(alone(work))


@pytest.fixture(autouse=True)
def clean_ledger() -> Iterator[None]:
    ledger.clear()
    yield
    ledger.clear()


class AsgiCall:
    """One request at the ASGI level: what is sent, when, and a client that may leave."""

    def __init__(
        self, app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.app = app
        given = {"content-type": "application/json", **(headers or {})}
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        self.messages: list[Any] = []
        self.times: list[float] = []
        self._body: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        self._left = asyncio.Event()

    async def receive(self) -> Any:
        if self._body:
            return self._body.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self.times.append(asyncio.get_running_loop().time())

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        await self.app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def chunks(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message.get("body")]

    def headers(self, name: str) -> list[str]:
        return [v.decode() for k, v in self.messages[0]["headers"] if k.decode().lower() == name]


@pytest.fixture
def asgi_call() -> type[AsgiCall]:
    return AsgiCall


class Plugins:
    """Endpoint plugins for `build_app`, without installing anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def use(self, *plugins: Any) -> None:
        self._patch.setattr("hardpoint.front_end.server.endpoints.load_endpoint_plugins", lambda tasks: list(plugins))


@pytest.fixture
def endpoint_plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return Plugins(monkeypatch)
