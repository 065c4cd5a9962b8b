"""The process that `hardpoint bench startup` starts: makes an engine, generates a token, and tells when.

    python -m hardpoint.cli.bench.one_start [engine flags]

Its times are the system's monotonic clock, which the process that started it reads too.
"""

from __future__ import annotations

import json
import sys
import time

from hardpoint.cli.bench.engine import add_engine_arguments, engine_of, random_prompts
from hardpoint.cli.main import explain
from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.errors import HardpointError
from hardpoint.types.sampling_params import SamplingParams


def main() -> int:
    """Make the engine and print one line of JSON; return the exit status."""
    parser = FlexibleArgumentParser(prog="hardpoint bench startup")
    try:
        add_engine_arguments(parser, sys.argv[1:])
        llm = engine_of(parser.parse_args(sys.argv[1:]))
    except HardpointError as error:
        return explain(error, "bench startup")
    ready = time.monotonic()
    llm.generate(random_prompts(llm, 1, 8), SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    print(json.dumps({"startup_time": ready, "first_token_time": time.monotonic()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
