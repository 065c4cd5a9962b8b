"""Suites that serve a tiny model with the part in question: models, loaders, workers, extensions, executors."""

from __future__ import annotations

import pytest
import torch

from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.contracts.worker import WorkerBase
from hardpoint.engine_core.executors.uni import UniProcExecutor
from hardpoint.extensions.registry import registry
from hardpoint.testing import (
    ContractFailure,
    check_executor,
    check_model,
    check_model_loader,
    check_worker,
    check_worker_extension,
)
from hardpoint.worker.device_worker import Worker
from hardpoint.worker.loaders.default import DefaultModelLoader
from hardpoint.worker.loaders.dummy import DummyModelLoader
from hardpoint.worker.models.llama import LlamaForCausalLM


class Louder(LlamaForCausalLM):
    """Another model of the same shape."""

    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states) * 2


def model(**methods):
    return type("Bad", (Louder,), methods)


def keeps_state(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
    self.calls = getattr(self, "calls", 0) + 1
    return LlamaForCausalLM.forward(self, input_ids, positions) * (1 + 0.1 * self.calls)


def mixes_rows(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
    hidden = LlamaForCausalLM.forward(self, input_ids, positions)
    return hidden + hidden.mean(0, keepdim=True)


def wrong_positions(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
    return LlamaForCausalLM.forward(self, input_ids, torch.arange(len(positions)))


def loads_half(self, weights):
    return LlamaForCausalLM.load_weights(self, [pair for pair in weights if "norm" not in pair[0]])


def test_good_models():
    before = registry("models").names()
    check_model(Louder)
    assert registry("models").names() == before


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive from torch"),
        (model(__init__=lambda self, config, prefix="": None), "its constructor takes config, prefix"),
        (model(embed_input_ids=None), "it has no embed_input_ids"),
        (model(compute_logits=None), "it has no compute_logits"),
        (model(forward=lambda self, tokens: None), "forward does not take input_ids, positions"),
        (model(forward=lambda self, input_ids, positions: None), "declares supports_pp but lacks"),
    ],
)
def test_classes_that_are_no_models(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_model(cls)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (model(forward=keeps_state), "a request computed alone differs"),
        (model(forward=mixes_rows), "a request computed alone differs"),
        (model(forward=wrong_positions), "differs"),
        (model(load_weights=loads_half), "building and loading it, then generating, raises"),
        (model(compute_logits=lambda self, hidden_states: hidden_states[0, 0, 0]), "generating, raises"),
    ],
)
def test_models_that_compute_something_else(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_model(cls)


class Forgetful(DefaultModelLoader):
    def load_weights(self, model, model_config):
        super().load_weights(model, model_config)
        next(model.parameters()).fill_(float("nan"))


@pytest.mark.parametrize("cls", [DefaultModelLoader, DummyModelLoader])
def test_good_loaders(cls):
    check_model_loader(cls)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (type("Bad", (BaseModelLoader,), {"load_weights": print}), "does not implement download_model"),
        (type("Bad", (DefaultModelLoader,), {"__init__": lambda self: None}), "cannot be called as the host"),
        (type("Bad", (DefaultModelLoader,), {"load_weights": lambda self, model, model_config: None}),
         "leaves 15 of 15 parameters without numbers, such as model.embed_tokens"),
        (Forgetful, "leaves 1 of"),
    ],
)  # fmt: skip
def test_bad_loaders(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_model_loader(cls)


class MyWorker(Worker):
    """A worker that counts its steps."""

    steps = 0

    def execute_model(self, scheduler_output):
        type(self).steps += 1
        return super().execute_model(scheduler_output)


class Mute(Worker):
    def execute_model(self, scheduler_output):
        output = super().execute_model(scheduler_output)
        output.sampled_token_ids = [[10**6] for _ in output.sampled_token_ids]
        return output


class Unhealthy(Worker):
    def check_health(self):
        raise RuntimeError("ill")


def test_good_workers():
    check_worker(Worker)
    check_worker(MyWorker)
    assert MyWorker.steps > 3


class Outer:
    class Inner(Worker):
        pass


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (type("Bad", (WorkerBase,), {}), "does not implement init_device"),
        (type("Bad", (Worker,), {"__init__": lambda self, config: None}), "cannot be called as the host"),
        (Outer.Inner, "defined inside another class"),
        (Unhealthy, "serving requests raises RuntimeError: ill"),
        (Mute, "for 5 more gets"),
    ],
)
def test_bad_workers(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_worker(cls)


def test_a_worker_must_have_a_name():
    class Local(Worker):
        pass

    with pytest.raises(ContractFailure, match="is defined in a function"):
        check_worker(Local)


class Extension:
    def twice(self, number):
        assert self.model_runner is not None
        return 2 * number


class Clashing:
    def execute_model(self):
        pass


class WithInit(Extension):
    def __init__(self):
        pass


def test_extensions():
    assert check_worker_extension(Extension, "twice", (21,)) == 42
    with pytest.raises(ContractFailure, match="defines execute_model"):
        check_worker_extension(Clashing)
    with pytest.raises(ContractFailure, match="its __init__ is never called"):
        check_worker_extension(WithInit)


class Silent(UniProcExecutor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        try:
            return super().collective_rpc(method, timeout, args, kwargs, non_block)
        except Exception:
            return [None]


class Wrong(UniProcExecutor):
    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        answers = super().collective_rpc(method, timeout, args, kwargs, non_block)
        return [*answers, None] if method == "get_supported_tasks" else answers


def test_executors():
    check_executor(UniProcExecutor)
    for cls, what in (
        (dict, "does not derive"),
        (Silent, "a method that no worker has raises nothing"),
        (Wrong, "collective_rpc gives"),
    ):
        with pytest.raises(ContractFailure, match=what):
            check_executor(cls)
