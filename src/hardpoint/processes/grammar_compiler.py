"""A grammar compiler process: compiles constraints on trial for an engine core, which may end it at any time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hardpoint.config.wire import from_wire
from hardpoint.engine_core.structured.backends import Backends, know_plugin
from hardpoint.engine_core.structured.trial import FAILED, READY, load_backend, try_job
from hardpoint.engine_core.structured.vocabulary import GrammarTokenizer
from hardpoint.extensions.boot import boot
from hardpoint.extensions.rows import Role
from hardpoint.links.channel import ChannelClosed
from hardpoint.links.children import ParentLink, attach
from hardpoint.links.codec import Decoder, Encoder
from hardpoint.log import configure, init_logger
from hardpoint.processes.child import end_process
from hardpoint.types.messages import GrammarCompilerStart, GrammarJob, GrammarVerdict, Hello

logger = init_logger(__name__)
_NAME = "grammar compiler"
# Steps of the model come first.
_NICENESS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Compile until the engine core lets go; return the exit status."""
    link = attach(sys.argv[1:] if argv is None else argv)
    configure(_NAME)
    os.nice(_NICENESS)
    try:
        # Not booted yet: our own backends need no plugin, and plugins may take their time.
        link.send(Hello(pid=os.getpid(), role=_NAME, index=link.index))
        start = Decoder(GrammarCompilerStart).decode(link.channel.receive())
        config = from_wire(start.config)
        _serve(link, Backends(config, GrammarTokenizer(config.model_config, start.table)))
    except ChannelClosed:
        link.end_with_parent()
    return 0


def _serve(link: ParentLink, backends: Backends) -> None:
    jobs, encoder, booted = Decoder(GrammarJob), Encoder(), False

    def answer(verdict: GrammarVerdict) -> None:
        link.channel.send(encoder.encode(verdict))

    while True:
        job = jobs.decode(link.channel.receive())
        if job.ref:
            try:
                if not booted:
                    boot(Role.ENGINE_CORE)
                know_plugin(job.backend, job.ref)
            except Exception as error:
                answer(GrammarVerdict(FAILED, f"the plugins cannot be loaded: {error}"))
                continue
            booted = True
        loaded = load_backend(backends, job)
        answer(loaded)
        if loaded.stage == READY:
            answer(try_job(backends, job))


if __name__ == "__main__":
    end_process(main())
