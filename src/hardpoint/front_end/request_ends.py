"""How requests ended, in the log (`--enable-log-requests`); how they came is logged by the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hardpoint.log import init_logger
from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.sampling_params import RequestOutputKind

logger = init_logger(__name__)
_LONGEST_FAULT = 500


class RequestEnd:
    """What is told of one request: its tokens, and why it ended.

    kind  whether an output has its tokens so far, or those since the last output
    """

    def __init__(self, kind: RequestOutputKind | None = None) -> None:
        self._adds = kind is RequestOutputKind.DELTA
        self._prompt = 0
        self._outputs: dict[int, int] = {}
        self._reasons: dict[int, str] = {}

    def saw(self, output: RequestOutput | PoolingRequestOutput) -> None:
        """Note an output."""
        self._prompt = len(output.prompt_token_ids or ())
        for one in output.outputs if isinstance(output, RequestOutput) else ():
            before = self._outputs.get(one.index, 0) if self._adds else 0
            self._outputs[one.index] = before + len(one.token_ids)
            if one.finish_reason is not None:
                self._reasons[one.index] = one.finish_reason

    @property
    def is_whole(self) -> bool:
        """Whether every output has ended."""
        return bool(self._reasons) and self._reasons.keys() == self._outputs.keys()

    def told(self) -> str:
        """The counts, and the reasons as far as there are any."""
        words = [f"{self._prompt} prompt tokens"] if self._prompt else []
        if self._outputs:
            words.append(f"{sum(self._outputs.values())} output tokens")
        return ", ".join([*words, *dict.fromkeys(self._reasons.values())])


@contextmanager
def logged(is_on: bool, request_id: str, end: RequestEnd) -> Iterator[RequestEnd]:
    """Log how the request of the block ends, and after how long."""
    begun, fault = time.monotonic(), ""
    try:
        yield end
    except (asyncio.CancelledError, GeneratorExit):
        # Who has the last output may leave without asking for more.
        fault = "" if end.is_whole else "aborted"
        raise
    except Exception as error:
        fault = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_FAULT]
        raise
    finally:
        if is_on:
            told = ", ".join(part for part in (end.told(), fault) if part)
            logger.info("request %s ended after %.2f s: %s", request_id, time.monotonic() - begun, told)
