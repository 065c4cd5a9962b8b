"""The suites for workers, worker extensions and executors: each serves a few requests of a tiny model."""

from __future__ import annotations

from typing import Any

from hardpoint.contracts.executor import Executor
from hardpoint.contracts.worker import WorkerBase
from hardpoint.errors import ConfigError
from hardpoint.extensions.refs import ref_of
from hardpoint.testing.engine import engine_here
from hardpoint.testing.failures import ContractFailure, explained, require, require_call, require_class, require_sync
from hardpoint.types.sampling_params import SamplingParams

_CALLED = ("init_device", "load_model", "get_kv_cache_spec", "determine_available_memory", "initialize_from_config",
           "compile_or_warm_up_model", "execute_model")  # fmt: skip
_PROMPTS = ([11, 7, 300], [9] * 20, [1, 2])


def check_worker(cls: Any, **arguments: Any) -> None:
    """Load the tiny model with the worker, serve requests, ask for its health, end it.

    arguments  more of LLM's, such as `model`
    """
    subject = require_class(cls, WorkerBase)
    for name in _CALLED:
        method = getattr(cls, name)
        require(
            method is not getattr(WorkerBase, name),
            subject,
            f"it does not implement {name}",
            "write it; see WorkerBase",
        )
    require_sync(cls, subject, *_CALLED)
    require_call(cls.__init__, subject, "__init__(self, vllm_config, local_rank, rank, distributed_init_method, "
                 "is_driver_worker=False)", None, vllm_config=None, local_rank=0, rank=0, distributed_init_method="",
                 is_driver_worker=True)  # fmt: skip
    name, fix = _dotted(cls, subject), "see the error this was raised from"
    with explained(subject, "serving requests", fix), engine_here(worker_cls=name, **arguments) as llm:
        _serve(llm, subject)
        tasks: Any = llm.collective_rpc("get_supported_tasks")[0]
        require("generate" in tasks, subject, f"get_supported_tasks gives {tasks!r}", 'return ("generate",)')
        llm.collective_rpc("check_health")


def check_worker_extension(cls: Any, method: str = "", args: tuple[Any, ...] = (), **arguments: Any) -> Any:
    """Mix the extension into the worker, serve requests, call `method` as `collective_rpc` does; its result.

    arguments  more of LLM's, such as `model`
    """
    subject = require_class(cls)
    require("__init__" not in vars(cls), subject, "its __init__ is never called", "take what you need in the methods")
    name, fix = _dotted(cls, subject), "give the methods names of your own, see the worker's"
    serving = explained(subject, "extending the worker and serving requests", fix)
    with serving, engine_here(worker_extension_cls=name, **arguments) as llm:
        _serve(llm, subject)
        return llm.collective_rpc(method, args=args)[0] if method else None


def check_executor(cls: Any, **arguments: Any) -> None:
    """Serve requests through the executor, and call workers by name and by mistake.

    arguments  more of LLM's, such as `model`
    """
    subject = require_class(cls, Executor)
    require_call(cls.collective_rpc, subject, "collective_rpc(self, method, timeout=None, args=(), kwargs=None, "
                 "non_block=False)", None, "m", timeout=1.0, args=(), kwargs={}, non_block=False)  # fmt: skip
    serving = explained(subject, "serving requests", "see the error this was raised from")
    with serving, engine_here(distributed_executor_backend=cls, **arguments) as llm:
        _serve(llm, subject)
        answers: Any = llm.collective_rpc("get_supported_tasks")
        right = isinstance(answers, list) and len(answers) == llm.llm_engine.vllm_config.parallel_config.world_size
        require(right, subject, f"collective_rpc gives {answers!r}", "return a list with one answer per worker")
        _refuses_unknown(llm, subject)


def _refuses_unknown(llm: Any, subject: str) -> None:
    try:
        llm.collective_rpc("no_such_method")
    except Exception:
        return
    what = "collective_rpc of a method that no worker has raises nothing"
    raise ContractFailure(subject, what, "let a worker's error reach the caller")


def _dotted(cls: type, subject: str) -> str:
    try:
        module, path = ref_of(cls).split(":")
    except ConfigError as error:
        raise ContractFailure(subject, error.what, error.fix) from None
    require("." not in path, subject, "it is defined inside another class", "move it to the top level of its module")
    return f"{module}.{path}"


def _serve(llm: Any, subject: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in _PROMPTS], params, use_tqdm=False)
    size = llm.model_config.get_vocab_size()
    for prompt, output in zip(_PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        require(
            len(tokens) == 5 and all(0 <= token < size for token in tokens),
            subject,
            f"a request of {len(prompt)} tokens for 5 more gets {tokens}",
            "return one token of the vocabulary for each request that a step completes",
        )
