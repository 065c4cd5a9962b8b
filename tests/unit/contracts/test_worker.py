import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hardpoint.config.current import get_current_vllm_config
from hardpoint.contracts import worker as contract
from hardpoint.contracts.worker import WorkerBase, WorkerWrapperBase
from hardpoint.errors import ConfigError, StartError
from hardpoint.extensions.rows import Role

SECTIONS = (
    "model",
    "cache",
    "lora",
    "load",
    "scheduler",
    "device",
    "speculative",
    "observability",
    "kv_transfer",
    "compilation",
)


class Platform:
    calls: list = []

    def register_triton_kernel_overrides(self):
        self.calls.append("triton")

    def update_block_size_for_backend(self, vllm_config):
        self.calls.append("block size")


class PlainWorker(WorkerBase):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        assert get_current_vllm_config() is self.vllm_config
        Platform.calls.append("built")

    def init_device(self):
        assert get_current_vllm_config() is self.vllm_config
        self.device = "here"

    def load_model(self, *, load_dummy_weights=False):
        Platform.calls.append("loaded")

    def initialize_from_config(self, kv_cache_config):
        self.plan = kv_cache_config

    def get_model(self):
        return "the model"

    def add(self, a, b=0):
        return a + b


class Extension:
    label = "extended"

    def whose_device(self):
        return self.device

    def _private(self):
        return 1


class Clashing:
    def add(self, a):
        return a

    def get_model(self):
        return None


class WithInit:
    def __init__(self):
        raise AssertionError("called")

    def hello(self):
        return "hello"


MODULE = ModuleType("a_worker_package")
for kind in (PlainWorker, Extension, Clashing, WithInit):
    setattr(MODULE, kind.__name__, kind)
MODULE.number = 3


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_worker_package", MODULE)
    platform = Platform()
    Platform.calls = []
    real = contract.load_ref
    monkeypatch.setattr(contract, "load_ref", lambda ref: platform if "current_platform" in ref else real(ref))
    monkeypatch.setattr(contract, "boot", lambda role: Platform.calls.append(role))
    sections = {f"{name}_config": SimpleNamespace() for name in SECTIONS}
    parallel = SimpleNamespace(worker_cls="a_worker_package.PlainWorker", worker_extension_cls="", rank=0)
    return SimpleNamespace(parallel_config=parallel, **sections)


def build(config, rank=0, ranks=1):
    wrapper = WorkerWrapperBase(rpc_rank=rank)
    wrapper.init_worker(
        [
            dict(vllm_config=config, local_rank=i, rank=i, distributed_init_method="", is_driver_worker=i == 0)
            for i in range(ranks)
        ]
    )
    return wrapper


def test_plugins_load_before_kernels_and_the_worker(config):
    build(config)
    assert Platform.calls == [Role.WORKER, "triton", "built"]


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(config, monkeypatch, given):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, **given})
    build(config)
    assert os.environ.get("OMP_WAIT_POLICY") == (given or {"OMP_WAIT_POLICY": "PASSIVE"}).get("OMP_WAIT_POLICY")


def test_each_rank_takes_its_own_arguments_and_plan(config):
    wrapper = build(config, rank=1, ranks=2)
    assert wrapper.worker.rank == 1
    assert config.parallel_config.rank == 1
    wrapper.initialize_from_config(["plan 0", "plan 1"])
    assert wrapper.worker.plan == "plan 1"


def test_the_platform_settles_the_block_size_after_the_model_is_loaded(config):
    build(config).load_model()
    assert Platform.calls[-2:] == ["loaded", "block size"]


def test_unknown_attributes_are_the_workers(config):
    wrapper = build(config)
    wrapper.init_device()
    assert wrapper.device == "here"
    assert wrapper.execute_method("add", 2, b=3) == 5
    assert wrapper.execute_method(lambda worker, n: (worker.get_model(), n), 4) == ("the model", 4)
    assert wrapper.apply_model(str.upper) == "THE MODEL"
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = wrapper.nothing_like_it
    with pytest.raises(NotImplementedError, match="'nothing_like_it' is not implemented"):
        wrapper.execute_method("nothing_like_it")


def test_before_it_is_built_a_worker_has_nothing(config):
    wrapper = WorkerWrapperBase()
    with pytest.raises(AttributeError):
        _ = wrapper.device
    with pytest.raises((StartError, AssertionError)):
        wrapper.init_device()
    wrapper.shutdown()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("auto", "still 'auto'.*Platform did not choose"),
        ("NoDots", "cannot be loaded"),
        ("a_worker_package.Missing", "Missing"),
        ("no_such_package.Worker", "no_such_package"),
        ("a_worker_package.number", "not a class"),
        (PlainWorker, "must be a string"),
        (None, "must be a string"),
    ],
)
def test_worker_classes_that_cannot_be_used_are_named(config, name, what):
    config.parallel_config.worker_cls = name
    with pytest.raises(ConfigError, match=what) as caught:
        build(config)
    assert isinstance(caught.value, ValueError)
    assert "worker_cls" in str(caught.value)


def test_an_extension_adds_methods_to_this_engines_worker_only(config):
    config.parallel_config.worker_extension_cls = "a_worker_package.Extension"
    wrapper = build(config)
    wrapper.init_device()
    assert wrapper.execute_method("whose_device") == "here"
    assert wrapper.label == "extended"
    assert isinstance(wrapper.worker, PlainWorker)
    assert not hasattr(PlainWorker, "whose_device")
    config.parallel_config.worker_extension_cls = ""
    assert not hasattr(build(config).worker, "whose_device")


def test_an_extension_that_clashes_is_refused_by_attribute_and_class(config):
    config.parallel_config.worker_extension_cls = "a_worker_package.Clashing"
    with pytest.raises(ValueError, match=r"Clashing defines add, get_model.*PlainWorker has already"):
        build(config)


def test_an_extensions_constructor_is_not_called_and_said_so(config, caplog, monkeypatch):
    config.parallel_config.worker_extension_cls = "a_worker_package.WithInit"
    monkeypatch.setattr(contract.logger, "propagate", True)
    monkeypatch.setattr(contract.logger.parent, "propagate", True)
    with caplog.at_level("WARNING"):
        assert build(config).hello() == "hello"
    assert "WithInit has an __init__, which is not called" in caplog.text


def test_a_worker_says_by_name_what_it_does_not_do(config):
    worker = build(config).worker
    for method, args in (("sleep", (1,)), ("add_lora", (None,)), ("execute_model", (None,)), ("profile", ())):
        with pytest.raises(NotImplementedError, match=f"PlainWorker does not implement '{method}'"):
            getattr(worker, method)(*args)
    assert worker.take_draft_token_ids() is None
    assert worker.check_health() is None
