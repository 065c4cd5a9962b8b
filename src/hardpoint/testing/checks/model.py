"""The suite for model classes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hardpoint.contracts.model import accepts_keyword, remarks_on
from hardpoint.extensions.registry import isolated, registry
from hardpoint.testing.engine import engine_here
from hardpoint.testing.failures import explained, require, require_class
from hardpoint.types.sampling_params import SamplingParams

_PROMPTS = ([11, 7, 300, 42, 5], [9] * 40 + [17, 3], [200 + n for n in range(25)])
_CLOSE = 5e-3  # log-probabilities of float32 computed in another order


def check_model(cls: Any, model: Path | str | None = None, **arguments: Any) -> None:
    """Build and load the class, and generate with it: whole, in chunks, alone and beside others.

    model      a checkpoint the class can load; a tiny random Llama unless given
    arguments  more of LLM's
    """
    subject = require_class(cls, nn.Module)
    check_model_class(cls)
    overrides = {"architectures": [cls.__name__], **arguments.pop("hf_overrides", {})}
    with isolated():
        registry("models").register(cls.__name__, cls)
        with explained(subject, "building and loading it, then generating,", "see the error this was raised from"):
            with engine_here(model, hf_overrides=overrides, **arguments) as llm:
                whole = _generate(llm, _PROMPTS)
                alone = [_generate(llm, [prompt])[0] for prompt in _PROMPTS]
            with engine_here(model, hf_overrides=overrides, max_num_batched_tokens=8, **arguments) as llm:
                chunked = _generate(llm, _PROMPTS)
    what = "a request computed alone differs from the same request beside others"
    _compare(subject, whole, alone, what, "keep rows of different requests apart: attention layers do that for you")
    what = "a prompt computed over several steps differs from one computed at once"
    _compare(subject, whole, chunked, what, "take positions from `positions` and keep no state between steps")


def check_model_class(cls: Any) -> None:
    """What can be seen without building it: constructor, methods, declared abilities."""
    subject = require_class(cls, nn.Module)
    names = inspect.signature(cls.__init__).parameters
    require(
        "vllm_config" in names and "prefix" in names,
        subject,
        f"its constructor takes {', '.join(name for name in names if name != 'self') or 'nothing'}",
        'write it as __init__(self, *, vllm_config, prefix="")',
    )
    for method, keywords in {
        "embed_input_ids": ("input_ids",),
        "forward": ("input_ids", "positions"),
        "compute_logits": ("hidden_states",),
        "load_weights": ("weights",),
    }.items():
        found = getattr(cls, method, None)
        shape = f"{method}(self, {', '.join(keywords)})"
        require(callable(found), subject, f"it has no {method}", f"write {shape}; see the contract")
        lacks = [name for name in keywords if not accepts_keyword(found, name)]  # type: ignore[arg-type]
        require(not lacks, subject, f"{method} does not take {', '.join(lacks)}", f"write it as {shape}")
    remarks = remarks_on(cls)
    require(not remarks, subject, "; ".join(remarks), "declare an ability whole, or not at all; see contracts.model")


def _generate(llm: Any, prompts: Sequence[list[int]]) -> list[list[float]]:
    """Per prompt: the log-probability of each of its tokens and of the first one after it, the most likely."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        steps: list[Any] = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        found.append([next(iter(step.values())).logprob for step in steps])
    return found


def _compare(subject: str, expected: list[list[float]], found: list[list[float]], what: str, fix: str) -> None:
    for numbers, others in zip(expected, found, strict=True):
        worst = max(abs(one - other) for one, other in zip(numbers, others, strict=True))
        require(worst < _CLOSE, subject, f"{what} (by {worst:.3g} in a log-probability)", fix)
