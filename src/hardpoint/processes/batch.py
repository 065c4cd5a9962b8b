"""The front end of `run-batch`: an engine and the server's application, asked from a file in place of a port."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from hardpoint.env import envs
from hardpoint.errors import StartError
from hardpoint.extensions.boot import boot, load_request_hooks, report_unused_settings
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.rows import Role
from hardpoint.front_end.batch.files import (
    InputFacts,
    Results,
    check_apart,
    is_url,
    local_input,
    look_at,
    read_requests,
    upload,
)
from hardpoint.links.strays import end_strays, mark_run
from hardpoint.log import configure, init_logger
from hardpoint.processes.front_end import check_early, start_engine
from hardpoint.processes.stopping import StopRequested, StopSignals

if TYPE_CHECKING:
    from hardpoint.front_end.async_llm import AsyncLLM
    from hardpoint.front_end.batch.runner import Tally

logger = init_logger(__name__)
# Loaded once the engine core is on its way.
_BUILD_APP = "hardpoint.front_end.server.app:build_app"
_INIT_APP_STATE = "hardpoint.front_end.server.app:init_app_state"
_RUNNER = "hardpoint.front_end.batch.runner:BatchRunner"
_UVLOOP = "uvloop:new_event_loop"
INTERRUPTED = 130


def run(args: Namespace) -> int:
    """Answer the requests of `args.input_file`; return the exit status.

    0 when every request has a result, also a refusal; 130 when interrupted. Raises the HardpointError
    that stopped the start or the run; results so far are kept for the next run then.
    """
    configure("front end")
    with StopSignals() as signals, local_input(args.input_file, args.output_tmp_dir) as source:
        facts = look_at(source, _line_limit())
        output = _output_of(args)
        check_apart(source, output)
        with closing(Results(output, _key(facts, args), args.no_resume)) as results:
            if results.answered:
                logger.info("%d results of an earlier run are kept; --no-resume asks anew", len(results.answered))
            try:
                return _run(args, signals, source, facts, results)
            except StopRequested:
                logger.warning("interrupted%s", _how_to_go_on(facts, results))
                return INTERRUPTED
            except BaseException:
                if results.count:
                    logger.warning("the batch has failed%s", _how_to_go_on(facts, results))
                raise
            finally:
                end_strays()


def _how_to_go_on(facts: InputFacts, results: Results) -> str:
    if not results.count:
        return "; it has no results yet"
    done = f"{results.count} of {facts.requests} results are in {results.partial}"
    return f"; {done}: the same command goes on from there, with --no-resume it begins anew"


def _line_limit() -> int:
    return envs.HARDPOINT_MAX_BODY_MB << 20


def _output_of(args: Namespace) -> Path:
    """Where results are collected: the output itself, or for an address a file that is sent there at the end."""
    if not is_url(args.output_file):
        return Path(args.output_file).expanduser()
    folder = Path(args.output_tmp_dir or tempfile.gettempdir())
    name = hashlib.sha256(args.output_file.encode()).hexdigest()[:12]
    return folder / f"hardpoint-batch-{name}.jsonl"


def _key(facts: InputFacts, args: Namespace) -> str:
    return hashlib.sha256(f"{facts.digest} {args.model}".encode()).hexdigest()


def _run(args: Namespace, signals: StopSignals, source: Path, facts: InputFacts, results: Results) -> int:
    check_early(args)
    mark_run()
    boot(Role.FRONT_END)
    # One that cannot be loaded is found before the model is.
    load_request_hooks()
    engine = start_engine(args)
    try:
        with asyncio.Runner(loop_factory=load_ref(_UVLOOP)) as runner:
            tally = runner.run(_ask(args, signals, engine, source, facts, results))
        dead = engine.errored
    finally:
        engine.shutdown()
    if dead:
        raise StartError(
            f"the engine ended before every request was answered: {tally.answered} of {facts.requests} are",
            code="engine-dead",
            origin="run-batch",
            fix="see the error above",
        )
    _finish(args, results, tally)
    return 0


def _finish(args: Namespace, results: Results, tally: Tally) -> None:
    results.publish()
    answered = tally.answered + len(results.answered)
    logger.info("%d requests answered, %d refused or failed: %s", answered, tally.failed, results.output)
    if is_url(args.output_file):
        upload(results.output, args.output_file)
        results.output.unlink()


async def _ask(
    args: Namespace, signals: StopSignals, engine: AsyncLLM, source: Path, facts: InputFacts, results: Results
) -> Tally:
    app = load_ref(_BUILD_APP)(args, await engine.get_supported_tasks())
    await load_ref(_INIT_APP_STATE)(engine, app.state, args)
    report_unused_settings(final=True)
    with _progress(facts, results) as bar:
        runner = load_ref(_RUNNER)(
            app,
            results,
            key=(app.state.settings.accepted_keys() or ("",))[0],
            # As many again as the engine computes at a time, so that it never waits for one.
            at_once=2 * engine.vllm_config.scheduler_config.max_num_seqs,
            engine_dead=lambda: engine.errored,
            on_result=bar.update,
        )
        asking = asyncio.create_task(runner.run(read_requests(source, _line_limit())))
        loop = asyncio.get_running_loop()
        signals.listen_with(lambda: loop.call_soon_threadsafe(asking.cancel))
        try:
            return await asking
        except asyncio.CancelledError:
            raise StopRequested(signals.requested) from None


def _progress(facts: InputFacts, results: Results) -> Any:
    return tqdm(
        total=facts.requests,
        initial=len(results.answered),
        unit="request",
        desc="run-batch",
        # Logs are lines; a bar is for somebody who looks on.
        disable=not sys.stderr.isatty(),
    )
