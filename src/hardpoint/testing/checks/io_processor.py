"""The suite for IO processors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.testing.failures import ContractFailure, explained, require, require_call, require_class, require_sync
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.outputs import PoolingRequestOutput
from hardpoint.types.pooling_params import PoolingParams

_NONSENSE = object()


def check_io_processor(cls: Any, data: Any = None, output_of: Callable[[int], Any] | None = None) -> Any:
    """Take one request through the processor: parse, prompts, parameters, answer. Returns the answer.

    data       the `data` of a request it accepts; without it the request itself is left out
    output_of  number of a prompt -> `outputs.data` of the model for it; four random numbers unless given
    """
    subject = require_class(cls, IOProcessor)
    require_sync(cls, subject, "parse_data", "pre_process", "post_process", "merge_pooling_params")
    require_call(cls.__init__, subject, "__init__(self, vllm_config, renderer)", None, None, None)
    require(
        cls.parse_data is not IOProcessor.parse_data,
        subject,
        "it does not implement parse_data",
        "check and convert the request's data there",
    )
    require_call(cls.pre_process, subject, "pre_process(self, prompt, request_id=None, **kwargs)", None, prompt=0,
                 request_id="r")  # fmt: skip
    shape = "post_process(self, model_output, request_id=None, **kwargs)"
    require_call(cls.post_process, subject, shape, None, [], request_id="r")
    with explained(subject, "the constructor", "it is called with (vllm_config, renderer)"):
        processor = cls(tiny_vllm_config(), None)
    _refuses(processor, subject)
    params = processor.merge_pooling_params()
    require(
        isinstance(params, PoolingParams),
        subject,
        f"merge_pooling_params() gives {params!r}",
        "return PoolingParams, also when the request brings none",
    )
    return None if data is None else _request(processor, subject, data, output_of or _numbers)


def _refuses(processor: Any, subject: str) -> None:
    """Data that nobody can accept is refused as the client's mistake, not as the server's."""
    try:
        processor.parse_data(_NONSENSE)
    except ValueError:
        return
    except Exception as error:
        what = f"parse_data raises {type(error).__name__} for data that is not acceptable, which is answered with 500"
        raise ContractFailure(subject, what, "raise ValueError, which is answered with 400") from error


def _request(processor: Any, subject: str, data: Any, output_of: Callable[[int], Any]) -> Any:
    with explained(subject, "parse_data", "it must take the data you gave this suite"):
        parsed = processor.parse_data(data)
    with explained(subject, "pre_process", "it gets what parse_data returned"):
        prompts = processor.pre_process(prompt=parsed, request_id="r0")
    require(prompts is not None, subject, "pre_process gives None", "return a prompt or a sequence of prompts")
    count = len(prompts) if isinstance(prompts, (list, tuple)) else 1
    require(count > 0, subject, "pre_process gives no prompt", "return at least one")
    outputs = [
        PoolingRequestOutput(
            f"r0-{i}", SimpleNamespace(data=output_of(i)), [1, 2, 3], num_cached_tokens=0, finished=True
        )
        for i in range(count)
    ]
    with explained(subject, "post_process", "it gets the outputs of all prompts, in their order"):
        answer = processor.post_process(outputs, request_id="r0")
    require(answer is not None, subject, "post_process gives None", "return the answer")
    return answer


def _numbers(prompt: int) -> Any:
    return np.random.default_rng(prompt).standard_normal(4).astype(np.float32)
