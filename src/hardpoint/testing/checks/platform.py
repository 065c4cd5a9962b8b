"""The suite for platforms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hardpoint import platforms
from hardpoint.config.arguments import FlexibleArgumentParser
from hardpoint.config.wire import to_wire
from hardpoint.contracts.attention_backend import AttentionBackend, AttentionSelectorConfig
from hardpoint.contracts.platform import Platform, PlatformEnum
from hardpoint.contracts.worker import WorkerBase
from hardpoint.errors import HardpointError
from hardpoint.extensions.refs import load_ref, resolve_obj_by_qualname
from hardpoint.testing.engine import engine_here
from hardpoint.testing.failures import ContractFailure, explained, require, require_call, require_class
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.sampling_params import SamplingParams

_FACTS = ("device_name", "device_type", "dispatch_key", "device_control_env_var")
_HOOKS: dict[str, tuple[Any, ...]] = {
    "pre_register_and_update": (None,),
    "validate_environ": (False,),
    "apply_config_platform_defaults": (None,),
    "check_and_update_config": (None,),
    "register_triton_kernel_overrides": (),
    "update_block_size_for_backend": (None,),
    "get_kv_cache_config_builder_cls": (),
    "get_device_communicator_cls": (),
    "import_kernels": (),
}


def check_platform(cls: Any, serves: bool = False) -> None:
    """Make the platform the current one and configure a server with it.

    serves  whether its device is here, so that a few requests can be served too
    """
    subject = require_class(cls, Platform)
    _check_facts(cls, subject)
    for name, args in _HOOKS.items():
        require_call(getattr(cls, name), subject, f"{name}, a classmethod; see Platform", *args)
    with _current(cls, subject):
        with explained(subject, "pre_register_and_update", "it is called with and without the parser"):
            cls.pre_register_and_update()
            cls.pre_register_and_update(FlexibleArgumentParser())
        with explained(subject, "making a configuration", "see check_and_update_config and the error before this one"):
            config = tiny_vllm_config()
        _check_config(config, subject)
        _check_attention(cls, subject)
        if serves:
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            with explained(subject, "serving requests", "see the error this was raised from"), engine_here() as llm:
                llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)


def _check_facts(cls: Any, subject: str) -> None:
    require(isinstance(cls.__dict__.get("_enum", getattr(cls, "_enum", None)), PlatformEnum), subject,
            "it has no _enum", "write `_enum = PlatformEnum.OOT`")  # fmt: skip
    for name in _FACTS:
        value = getattr(cls, name, None)
        require(isinstance(value, str) and value, subject, f"{name} is {value!r}", "give it as text")
    for name in ("check_and_update_config", "get_attn_backend_cls"):
        own = getattr(cls, name).__func__ is not getattr(Platform, name).__func__
        require(own, subject, f"it does not implement {name}", "write it as a classmethod; see Platform")
    with explained(subject, "reading its dtypes", "return torch dtypes, best first"):
        dtypes = cls().supported_dtypes
    known = isinstance(dtypes, list) and dtypes and all(isinstance(one, torch.dtype) for one in dtypes)
    require(known, subject, f"supported_dtypes is {dtypes!r}", "return a list of torch dtypes, best first")


@contextmanager
def _current(cls: Any, subject: str) -> Iterator[None]:
    with explained(subject, "making one", "it is made without arguments"):
        cls()
    before = load_ref("hardpoint.platforms:current_platform")
    platforms.set_current_platform(cls)
    try:
        yield
    finally:
        platforms.set_current_platform(before)


def _check_config(config: Any, subject: str) -> None:
    name = config.parallel_config.worker_cls
    worker = _imported(subject, "parallel_config.worker_cls", name)
    right = isinstance(worker, type) and issubclass(worker, WorkerBase)
    require(right, subject, f"worker_cls {name!r} is no WorkerBase", "name a class that derives from WorkerBase")
    first = to_wire(config)
    with explained(subject, "settling the configuration a second time", "hooks run in the engine core too"):
        config.__post_init__()
    require(
        to_wire(config) == first,
        subject,
        "its hooks change the configuration again when they run a second time",
        "look whether there is something to do: hooks run in the front end and again in the engine core",
    )


def _check_attention(cls: Any, subject: str) -> None:
    dtype = cls().supported_dtypes[0]
    facts = AttentionSelectorConfig(head_size=64, dtype=dtype, kv_cache_dtype="auto", block_size=16)
    with explained(subject, "get_attn_backend_cls without a named backend", "return the dotted path of a class"):
        name = cls.get_attn_backend_cls(None, attn_selector_config=facts, num_heads=4)
    backend = _imported(subject, "get_attn_backend_cls", name)
    right = isinstance(backend, type) and issubclass(backend, AttentionBackend)
    require(right, subject, f"get_attn_backend_cls gives {name!r}", "name a class that derives from AttentionBackend")


def _imported(subject: str, what: str, name: Any) -> Any:
    require(isinstance(name, str) and name, subject, f"{what} is {name!r}", "give the dotted path of a class")
    try:
        return load_ref(name) if ":" in name else resolve_obj_by_qualname(name)
    except HardpointError as error:
        raise ContractFailure(subject, f"{what} cannot be imported: {error.what}", error.fix) from error
