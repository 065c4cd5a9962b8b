"""The process of `serve --headless`: an engine core without an HTTP server, for a front end elsewhere.

It takes the address, starts the engine core as a front end would, and stands between the two until it is
told to end or the engine core has ended.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace

from hardpoint.config.agreement import facts_of
from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.config.flags import FRONT_END_FLAGS
from hardpoint.errors import ConfigError
from hardpoint.extensions.boot import boot
from hardpoint.extensions.discovery import Allowlist, catalogue
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.points import group_row
from hardpoint.extensions.rows import Role
from hardpoint.front_end.engine_handle import no_replicas
from hardpoint.front_end.engine_process import EngineProcess, preload_for
from hardpoint.links.strays import end_strays, mark_run
from hardpoint.links.tcp import Endpoint, endpoint_of
from hardpoint.log import configure, init_logger
from hardpoint.processes.gate import Gate
from hardpoint.processes.stopping import StopRequested, StopSignals

logger = init_logger(__name__)


def serve(args: Namespace) -> int:
    """Run an engine for `serve`'s flags until it is told to end; return the exit status.

    0 after a clean stop, 1 when the engine core ended by itself. Raises the HardpointError that
    stopped the start; nothing is left running then.
    """
    configure("headless engine")
    with StopSignals() as signals:
        try:
            return _serve(args, signals)
        except StopRequested:
            return 0
        finally:
            end_strays()


def _serve(args: Namespace, signals: StopSignals) -> int:
    _refuse(args)
    endpoint = endpoint_of(args.data_parallel_address, args.data_parallel_rpc_port)
    # From here on the address is ours, and a front end is told how far we are.
    with contextlib.closing(Gate(endpoint)) as gate:
        mark_run()
        boot(Role.FRONT_END)
        _tell_unused_plugins()
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config("server", headless=True)
        gate.expect(facts_of(engine_args, config))
        process = EngineProcess(preload_for(engine_args))
        try:
            process.begin(config)
            gate.open(process.wait_ready(), process.address)
            process.on_death(gate.engine_died)
            return _run(gate, process, endpoint, signals, config.shutdown_timeout)
        finally:
            process.shutdown()


def _run(gate: Gate, process: EngineProcess, endpoint: Endpoint, signals: StopSignals, drain_s: float) -> int:
    signals.listen_with(lambda: gate.stop(drain_s))
    logger.info("ready: a front end can connect to %s", endpoint)
    gate.wait()
    return 1 if process.error is not None and signals.requested is None else 0


def _tell_unused_plugins() -> None:
    """Plugins that would load here if there were an HTTP server: someone may wait for them in vain."""
    allowlist = Allowlist.read()
    for row in (group_row("endpoints"), group_row("stat_loggers"), group_row("request_hooks")):
        for found in catalogue.group(row.group):
            if not allowlist.refusal(row, found.name):
                why = "an engine without an HTTP server does not use this group"
                ledger.record("skip", row.key, found.name, origin=found.origin, detail=why)
                logger.info("%s plugin %r (%s) is left out: %s", row.group, found.name, found.package, why)


def _refuse(args: Namespace) -> None:
    """Refuse what the command line asks of an HTTP server, and an engine that is elsewhere."""
    given = [flag.names[0] for flag in FRONT_END_FLAGS if getattr(args, flag.dest, flag.default) != flag.default]
    given = [name for name in given if name != "--headless"]
    if args.data_parallel_size > 1:
        raise no_replicas("an engine without an HTTP server")
    if args.data_parallel_size_local == 0:
        given.append("--data-parallel-size-local 0")
    if given:
        raise ConfigError(
            f"{', '.join(given)} cannot be combined with --headless, which runs the engine and no HTTP server",
            code="flag-headless",
            origin="--headless",
            fix="give them to the server that uses this engine",
        )
