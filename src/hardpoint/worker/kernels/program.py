"""Runs a step of a model as one call of the kernels, where every layer of it is a built-in that nobody touched.

A model is recorded (`recording`) once its cache is bound. Before each step it is made sure that the model is still
what was recorded: no layer, parameter, hook or method was replaced. Where it is not, layers compute one by one.
"""

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hardpoint.log import init_logger
from hardpoint.worker.attention.cpu import CPUAttentionImpl, CPUAttentionMetadata
from hardpoint.worker.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_world_size
from hardpoint.worker.kernels.floats import Batch, Op, Program, Step
from hardpoint.worker.kernels.library import Library, kernels
from hardpoint.worker.kernels.packed import PackedLinear, PackedWeight
from hardpoint.worker.kernels.recording import BUILT_IN_METHODS, CannotRecord, Recorder, Value, noting
from hardpoint.worker.lora.methods import AdaptedMethod

logger = init_logger(__name__)

# Tokens of each thread that go through all layers together, so that what lies between layers stays in its core's
# cache, and the most of all threads. Later ones of a long prompt find the earlier ones in the KV cache.
TOKENS_EACH = 64
MOST_TOKENS = 1024

# What layers compute with that is no module.
_HELPERS = (CPUAttentionImpl, PackedLinear, *BUILT_IN_METHODS)


class StepProgram:
    """A recorded model. `group_of` names the KV cache group of each attention layer."""

    def __init__(self, model: nn.Module, library: Library, max_position: int, group_of: Mapping[str, int]) -> None:
        modules = list(model.modules())
        _refuse_touched(modules)
        panel = min(MOST_TOKENS, TOKENS_EACH * library.threads)
        recorder = Recorder(panel, max_position)
        with noting(recorder, modules):
            try:
                out = model(input_ids=recorder.ids, positions=recorder.positions)
            except CannotRecord:
                raise
            except Exception as error:
                raise CannotRecord(f"the model wants to see numbers: {type(error).__name__}: {error}") from error
        if not isinstance(out, Value) or out.heads or not recorder.ops or recorder.ops[-1].out != out.place:
            raise CannotRecord("the model's last operation is not its result")
        self.width = out.width
        # The last operation writes into the step's own tensor.
        recorder.ops[-1].out = None
        for number, layer in recorder.attention:
            recorder.ops[number].number = group_of[layer.layer_name]
        self._groups = max(group_of.values(), default=0) + 1
        self._run = library.run
        self._kept = recorder.kept
        self._ops = (Op * len(recorder.ops))(*recorder.ops)
        self._program = Program(ctypes.addressof(self._ops), len(recorder.ops), panel)
        self._place = ctypes.addressof(self._program)
        self._unchanged = _Unchanged(modules)

    @property
    def is_valid(self) -> bool:
        """Whether the model still is what was recorded."""
        return self._unchanged.holds()

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Sequence[CPUAttentionMetadata]
    ) -> torch.Tensor:
        """[tokens] int32 ids, [tokens] int64 positions, a step per KV cache group -> [tokens, hidden].

        Raises IndexError for an id that is not a token.
        """
        tokens = len(input_ids)
        out = torch.empty((tokens, self.width), dtype=torch.float32)
        if len(metadata) == 1:
            batches = ctypes.addressof(metadata[0].batch)
        else:
            array = (Batch * len(metadata))(*(part.batch for part in metadata))
            batches = ctypes.addressof(array)
        step = Step(tokens, input_ids.data_ptr(), positions.data_ptr(), batches, out.data_ptr(), self.width)
        if self._run(self._place, ctypes.addressof(step)):
            raise IndexError("a token id is out of range")
        return out


class _Unchanged:
    """Remembers what a model is made of, and tells in a few microseconds whether it still is.

    A module's hooks, parts and parameters are put into dicts that count changes, so that they need not be looked
    through before each step. What is set on a module itself shows in the number of its attributes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._dicts = [vars(module) for module in modules]
        for part in self._dicts:
            for name in ("_modules", "_parameters"):
                part[name] = _watched(part[name], _WatchedDict)
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                part[name] = _watched(part[name], _WatchedOrder)
        self._changes = _Watch.changes
        self._quantised = [part for part in self._dicts if "quant_method" in part]
        self._quant_methods = list(map(_own_method, self._quantised))
        self._sized = [*self._dicts, *map(vars, self._quant_methods)]
        self._sizes = list(map(len, self._sized))
        parameters = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
        self._packed = [one for one in parameters.values() if type(one) is PackedWeight]
        self._sealed = list(map(_SEALED, self._packed))
        self._plain = [one for one in parameters.values() if type(one) is not PackedWeight]
        self._places = list(map(torch.Tensor.data_ptr, self._plain))
        self._global_hooks = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        own = {type(module) for module in modules if _is_ours(type(module))} | set(_HELPERS)
        # Twice the first name, so that the getter always gives a tuple.
        self._getters = [(attrgetter(names[0], *names), cls) for cls in own if (names := _computing_methods(cls))]
        self._methods = list(self._found_methods())

    def holds(self) -> bool:
        """Whether all of it is still the same."""
        return (
            self._changes == _Watch.changes
            and not any(self._global_hooks)
            and self._sizes == list(map(len, self._sized))
            and all(map(is_, map(_own_method, self._quantised), self._quant_methods))
            and all(map(is_, map(_SEALED, self._packed), self._sealed))
            and self._places == list(map(torch.Tensor.data_ptr, self._plain))
            and self._has_its_methods()
        )

    def _found_methods(self) -> Iterator[Any]:
        return chain.from_iterable(getter(cls) for getter, cls in self._getters)

    def _has_its_methods(self) -> bool:
        try:
            return all(map(is_, self._found_methods(), self._methods))
        except AttributeError:
            return False


def _own_method(part: dict[str, Any]) -> Any:
    """A layer's quantisation method. What adapters have wrapped around it does nothing in a step without them."""
    method = part["quant_method"]
    return method.base if type(method) is AdaptedMethod else method


# What a packed weight computes with; another after it was loaded anew.
_SEALED = attrgetter("_sealed")


class _Watch:
    """Counts the changes to all watched dicts."""

    changes = 0


def _counting(name: str, base: type) -> Any:
    method = getattr(base, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        _Watch.changes += 1
        return method(self, *args, **kwargs)

    return counted


_CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
_WatchedDict: Any = type("_WatchedDict", (dict,), {name: _counting(name, dict) for name in _CHANGING})
_WatchedOrder: Any = type("_WatchedOrder", (OrderedDict,), {name: _counting(name, OrderedDict) for name in _CHANGING})


def _watched(part: Any, kind: Any) -> Any:
    return part if type(part) is kind else kind(part)


def _computing_methods(cls: type) -> list[str]:
    """The methods that may run in a step, its own and inherited ones."""
    names = {name for base in cls.__mro__ if _is_ours(base) for name in _methods(base)} | {"forward"}
    computing = (name for name in names if name.startswith(("forward", "apply", "embed", "__call__")))
    # What is bound anew at each look cannot be compared.
    return [name for name in computing if getattr(cls, name, None) is getattr(cls, name, ...)]


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("hardpoint.worker.")


def _classes(modules: Sequence[nn.Module]) -> set[type]:
    """Our classes that the modules are made of."""
    return {base for module in modules for base in type(module).__mro__ if _is_ours(base)} | set(_HELPERS)


def _methods(cls: type) -> list[str]:
    """Methods a layer may compute with."""
    return [
        name
        for name, value in vars(cls).items()
        if (name == "__call__" or not name.startswith("__"))
        and callable(getattr(value, "__func__", value))
        and not isinstance(value, type)
    ]


def _refuse_touched(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        cls = type(module)
        if not _is_ours(cls) and not cls.__module__.startswith("torch.nn.modules."):
            raise CannotRecord(f"{cls.__module__}.{cls.__qualname__} is not a built-in layer")
        if module._forward_hooks or module._forward_pre_hooks:
            raise CannotRecord(f"a {cls.__qualname__} has a hook")
        if "forward" in vars(module):
            raise CannotRecord(f"a {cls.__qualname__} has a forward of its own")
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise CannotRecord("there is a hook on all modules")
    for cls in _classes(modules):
        file = sys.modules[cls.__module__].__file__
        for name in _methods(cls):
            code = getattr(getattr(vars(cls)[name], "__func__", vars(cls)[name]), "__code__", None)
            if code is None or code.co_filename != file:
                raise CannotRecord(f"{cls.__qualname__}.{name} was replaced")


class ProgramOfModel:
    """A runner's program: made when it can be, and made anew or given up when the model changes."""

    def __init__(self, model: nn.Module, vllm_config: Any, group_of: Mapping[str, int]) -> None:
        self._model, self._config, self._group_of = model, vllm_config, group_of
        self._program = self._record()

    def current(self) -> StepProgram | None:
        """The program to run the next step with; None: compute layer by layer.

        Not to be asked for a step in which a request has an adapter: programs are those of the model's own layers.
        """
        program = self._program
        if program is not None and not program.is_valid:
            self._program = program = self._record()
        return program

    def _record(self) -> StepProgram | None:
        library = kernels()
        if library is None:
            return None
        try:
            if reason := _reason_against(self._config):
                raise CannotRecord(reason)
            longest = self._config.model_config.max_model_len or 1
            program = StepProgram(self._model, library, longest, self._group_of)
        except CannotRecord as reason:
            logger.info_once("the model computes layer by layer: %s", reason)
            return None
        logger.info_once("a step of the model is one call of the CPU kernels")
        return program


def _reason_against(config: Any) -> str:
    if get_tensor_model_parallel_world_size() > 1 or not (get_pp_group().is_first_rank and get_pp_group().is_last_rank):
        return "it is split over ranks"
    if config.compilation_config.mode:
        return "it is compiled"
    return ""
