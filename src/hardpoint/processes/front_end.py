"""The front end process: takes the port, starts the engine core, serves, and ends with both."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING

from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.env import envs
from hardpoint.errors import AdmissionError, ConfigError, HardpointError
from hardpoint.extensions.boot import boot, load_request_hooks, report_unused_settings
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.front_end.engine_handle import EngineHandle
from hardpoint.front_end.remote_engine import RemoteEngine, is_remote
from hardpoint.front_end.replicas import engine_of
from hardpoint.links.strays import end_strays, mark_run
from hardpoint.log import configure, init_logger
from hardpoint.processes.listening import Listener, listen
from hardpoint.processes.stopping import StopRequested, StopSignals

if TYPE_CHECKING:
    from hardpoint.front_end.async_llm import AsyncLLM

logger = init_logger(__name__)
# The platform is chosen at its first use, which is the boot's, when logging is set up.
_PLATFORM = "hardpoint.platforms:current_platform"
# Loaded once the engine core is on its way: fastapi, uvicorn and the tokenizers take a while.
ASYNC_LLM = "hardpoint.front_end.async_llm:AsyncLLM"
_LAUNCH = "hardpoint.processes.launcher:launch"
_BUILD_APP = "hardpoint.front_end.server.app:build_app"
_CHECK_PARSERS = "hardpoint.front_end.server.parser_flags:check_parsers"
_LOAD_MIDDLEWARE = "hardpoint.front_end.server.middleware:load_middleware"
_INIT_APP_STATE = "hardpoint.front_end.server.app:init_app_state"
_HTTP_SERVER = "hardpoint.processes.http_server:HttpServer"
_CHECK_TLS = "hardpoint.processes.http_server:check_tls"
_SETTINGS = "hardpoint.front_end.server.settings:ServerSettings"
_LOAD_TEMPLATE = "hardpoint.front_end.tokenizers.chat_template:load_chat_template"
_UVLOOP = "uvloop:new_event_loop"
# How long /health says 503 after the engine has ended, for those who poll it, before the server ends.
_DEAD_NOTICE_S = 3.0
# For responses to be written once their requests have ended, at most.
_FLUSH_S = 8


def serve(args: Namespace) -> int:
    """Run the server for `serve`'s flags until it is told to end; return the exit status.

    0 after a clean stop, 1 when the engine ended by itself. Raises the HardpointError that
    stopped the start; nothing is left running then.
    """
    configure("front end")
    with StopSignals() as signals:
        try:
            return _serve(args, signals)
        except StopRequested:
            return 0
        except HardpointError as error:
            logger.debug("traceback of the child:\n%s", getattr(error, "child_traceback", "none"))
            raise
        finally:
            end_strays()


def _serve(args: Namespace, signals: StopSignals) -> int:
    check_early(args)
    count = api_servers(args)
    with contextlib.closing(listen(args)) as listener:
        mark_run()
        boot(Role.FRONT_END)
        _check_middleware(args)
        # One that cannot be loaded is found before the model is.
        load_request_hooks()
        load_ref(_CHECK_PARSERS)(args)
        if count > 1:
            return load_ref(_LAUNCH)(args, listener, signals, count)
        engine = start_engine(args)
        try:
            return serve_requests(args, listener, engine, signals, lambda: logger.info("ready: %s", listener.where))
        finally:
            engine.shutdown()


def api_servers(args: Namespace) -> int:
    """How many API servers the flags ask for. Raises ConfigError for a number that cannot be."""
    count = getattr(args, "api_server_count", None)
    if count is None or count == 1:
        return 1
    if count < 1:
        what = "at least one is needed"
    elif args.data_parallel_size_local == 0:
        what = "an engine that is elsewhere lets one front end in at a time (--data-parallel-size-local 0)"
    elif envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        what = "adapters are loaded into one API server only (VLLM_ALLOW_RUNTIME_LORA_UPDATING)"
    else:
        return count
    raise ConfigError(f"--api-server-count is {count}: {what}", code="flag", origin="--api-server-count")


def _check_middleware(args: Namespace) -> None:
    """Find a --middleware that cannot be imported before the model is loaded for nothing."""
    for path in getattr(args, "middleware", None) or ():
        load_ref(_LOAD_MIDDLEWARE)(path)


def check_early(args: Namespace) -> None:
    """Find what is wrong with flags and files that are needed only once the model is loaded."""
    load_ref(_SETTINGS).from_args(args)
    if getattr(args, "chat_template", None):
        load_ref(_LOAD_TEMPLATE)(args.chat_template)
    if getattr(args, "ssl_keyfile", None) or getattr(args, "ssl_certfile", None):
        load_ref(_CHECK_TLS)(args)


def start_engine(args: Namespace) -> AsyncLLM:
    """Resolve the configuration and start the engine for `serve`'s flags. Raises what prevents it."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    process = early_engine(engine_args)
    # While the engine core imports torch, and later while we wait for its model.
    threading.Thread(target=_import_server, name="import", daemon=True).start()
    try:
        vllm_config = engine_args.create_engine_config("server")
        engine_class = load_ref(ASYNC_LLM)
        return engine_class.from_vllm_config(
            vllm_config,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            aggregate_engine_logging=bool(engine_args.aggregate_engine_logging),
            engine_process=process,
        )
    except BaseException:
        if process is not None:
            process.abandon()
        raise


def early_engine(engine_args: AsyncEngineArgs) -> EngineHandle | None:
    """The engine that is elsewhere, or ours, started early where that can be; None where it cannot."""
    if is_remote(engine_args):
        return RemoteEngine(engine_args)
    # A plugin's platform may set up the environment while the configuration is made, before
    # anything of the engine core may run; ours does not.
    built_in = type(load_ref(_PLATFORM)).__module__.startswith("hardpoint.")
    return engine_of(engine_args) if built_in else None


def _import_server() -> None:
    for ref in (ASYNC_LLM, _HTTP_SERVER, _BUILD_APP):
        # An error shows where the thing is used.
        with contextlib.suppress(Exception):
            load_ref(ref)


def serve_requests(
    args: Namespace, listener: Listener, engine: AsyncLLM, signals: StopSignals, tell_ready: Callable[[], object]
) -> int:
    """Take requests for a started engine until told to end; return the exit status.

    tell_ready  called once requests are taken
    """
    with asyncio.Runner(loop_factory=load_ref(_UVLOOP)) as runner:
        loop = runner.get_loop()
        stop = asyncio.Event()
        signals.listen_with(lambda: loop.call_soon_threadsafe(stop.set))
        return runner.run(_serve_until(stop, args, listener, engine, tell_ready))


async def _serve_until(
    stop: asyncio.Event, args: Namespace, listener: Listener, engine: AsyncLLM, tell_ready: Callable[[], object]
) -> int:
    app = load_ref(_BUILD_APP)(args, await engine.get_supported_tasks())
    await load_ref(_INIT_APP_STATE)(engine, app.state, args)
    report_unused_settings(final=True)
    server = load_ref(_HTTP_SERVER)(app, args, listener.socket)
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(engine.wait_for_death())
    await _publish_ledger(engine)
    tell_ready()
    done, _ = await asyncio.wait([serving, stopping, dying], return_when=asyncio.FIRST_COMPLETED)
    if dying in done and stopping not in done:
        await _linger(stopping)
    drain_s = 0 if engine.errored else engine.vllm_config.shutdown_timeout
    # Takes no new connection from here on, so that draining comes to an end.
    server.stop(drain_s + 2 * _FLUSH_S)
    await _drain(engine, drain_s)
    stopping.cancel()
    dying.cancel()
    await server.flush(_FLUSH_S)
    await serving
    # A server that ended although nobody asked for it did not end well either.
    return 1 if engine.errored or serving in done else 0


async def _publish_ledger(engine: AsyncLLM) -> None:
    """Let the other API servers of this engine know what happened here, for /plugins."""
    publish = getattr(engine, "publish_ledger", None)
    if publish is not None:
        await publish()


async def _linger(stopping: asyncio.Task[bool]) -> None:
    """The engine has ended by itself: say so on /health for a while, or until told to stop."""
    if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
        logger.error("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH is set: the server stays and answers 503")
        await stopping
        return
    await asyncio.wait([stopping], timeout=_DEAD_NOTICE_S)


async def _drain(engine: AsyncLLM, drain_s: int) -> None:
    """Give running requests `drain_s` seconds, then end them with an error."""
    running = engine.get_num_unfinished_requests()
    if running and drain_s:
        logger.info("waiting up to %d s for %d requests", drain_s, running)
        with contextlib.suppress(TimeoutError):
            await engine.wait_for_requests_to_drain(drain_s)
    await engine.fail_requests(AdmissionError("the server is shutting down", reason="shutdown"), for_good=True)
