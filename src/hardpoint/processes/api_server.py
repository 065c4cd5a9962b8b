"""One of several API servers: takes requests from the socket they share, for engine cores that the launcher started."""

from __future__ import annotations

import argparse
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardpoint.config.engine_args import AsyncEngineArgs
from hardpoint.extensions.ledger import ledger
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.front_end.shared_engine import engine_at
from hardpoint.links.children import ParentLink
from hardpoint.links.codec import Decoder, unpack
from hardpoint.processes.child import apply_environ, end_process, run_child
from hardpoint.processes.front_end import ASYNC_LLM, serve_requests
from hardpoint.processes.listening import Listener
from hardpoint.processes.stopping import StopRequested, StopSignals
from hardpoint.types.messages import ApiServerStart, Ready

if TYPE_CHECKING:
    from hardpoint.front_end.async_llm import AsyncLLM

_starts = Decoder(ApiServerStart)


def _serve(link: ParentLink) -> int:
    with StopSignals() as signals:
        try:
            return _serve_until_told(link, signals)
        except StopRequested:
            return 0


def _serve_until_told(link: ParentLink, signals: StopSignals) -> int:
    start = _starts.decode(link.channel.receive())
    apply_environ(start.environ)
    # What happened in the launcher, for who asks us.
    ledger.merge(start.ledger)
    args = Namespace(**unpack(start.args))
    listener = Listener(socket.socket(fileno=link.options.listen_fd), start.where)
    engine = _start_engine(args, start, link)
    try:
        return serve_requests(args, listener, engine, signals, lambda: link.send(Ready()))
    finally:
        engine.shutdown()


def _start_engine(args: Namespace, start: ApiServerStart, link: ParentLink) -> AsyncLLM:
    engine_args = AsyncEngineArgs.from_cli_args(args)
    return load_ref(ASYNC_LLM).from_vllm_config(
        engine_args.create_engine_config("server"),
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
        aggregate_engine_logging=bool(engine_args.aggregate_engine_logging),
        client_count=start.client_count,
        client_index=link.index,
        engine_process=engine_at(start.addresses, link),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one API server until the launcher lets go; return the exit status."""
    parser = argparse.ArgumentParser(prog="hardpoint API server")
    parser.add_argument("--listen-fd", type=int, required=True, help="the socket that all API servers share")
    return run_child(sys.argv[1:] if argv is None else argv, Role.FRONT_END, "API server", _serve, parser)


if __name__ == "__main__":
    end_process(main())
