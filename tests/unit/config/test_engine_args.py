"""Engine arguments: names, refusals, defaults, and what they become."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys

import pytest

from hardpoint.compat import finder
from hardpoint.config.engine_args import AsyncEngineArgs, EngineArgs
from hardpoint.config.sections import DEFAULT_MODEL, CompilationConfig, LoggingConfig
from hardpoint.config.wire import from_wire, to_wire
from hardpoint.errors import ConfigError
from hardpoint.extensions.boot import has_booted
from hardpoint.extensions.registry import isolated, registry


@pytest.fixture
def create(llama_folder, probe):
    folder = llama_folder()

    def make(use: str = "server", **values):
        return EngineArgs(**{"model": str(folder), **values}).create_engine_config(use)

    return make


def test_unknown_keyword_is_a_type_error_with_the_near_miss():
    with pytest.raises(TypeError, match=r"no engine argument 'max_num_seq'; did you mean max_num_seqs\?"):
        EngineArgs(max_num_seq=4)
    with pytest.raises(TypeError, match="'port' is an option of the HTTP server"):
        AsyncEngineArgs(port=1)


def test_they_are_a_dataclass_that_can_be_copied_and_extended():
    args = EngineArgs("some/model", max_num_seqs=4)
    assert args.model == "some/model"
    assert dataclasses.replace(args, seed=3).seed == 3
    assert copy.deepcopy(args) == args
    assert EngineArgs().model == DEFAULT_MODEL

    @dataclasses.dataclass
    class MyArgs(EngineArgs):
        depth: int = 1

    assert MyArgs(depth=2, seed=5).seed == 5


def test_making_them_loads_the_general_plugins():
    EngineArgs()
    assert has_booted()


@pytest.fixture
def alias():
    """`import vllm` as in our processes."""
    there = "vllm" in sys.modules
    finder.install()
    yield
    if not there:
        finder.uninstall()


def test_parsers_of_files_are_there_for_scripts_too(llama_folder, tmp_path, monkeypatch, alias):
    (tmp_path / "toy.py").write_text(
        "from vllm.reasoning import ReasoningParserManager\nfrom vllm.tool_parsers import ToolParserManager\n"
        "from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser\n"
        "from vllm.reasoning.qwen3_reasoning_parser import Qwen3ReasoningParser\n"
        "ToolParserManager.register_module('toy', module=Hermes2ProToolParser)\n"
        "ReasoningParserManager.register_module('toy', module=Qwen3ReasoningParser)\n"
    )
    monkeypatch.chdir(tmp_path)
    model = str(llama_folder())
    with isolated():
        EngineArgs(model=model, tool_parser_plugin="toy.py", reasoning_parser="toy").create_engine_config()
        assert "toy" in registry("tool_parsers")
        given = {"reasoning_parser": "nobodys", "reasoning_parser_plugin": "./toy.py"}
        with pytest.raises(ConfigError, match=r"'nobodys' is not registered.*registered toy"):
            EngineArgs(model=model, **given).create_engine_config()


def test_the_model_config_alone_is_settled(llama_folder):
    args = EngineArgs(model=str(llama_folder()), max_model_len=100)
    model = args.create_model_config()
    assert (model.architecture, model.max_model_len, model.dtype) == ("LlamaForCausalLM", 100, "float32")
    assert args.create_engine_config().model_config == model


def test_values_reach_their_fields(create):
    config = create(
        max_model_len=256,
        block_size=32,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=1 << 20,
        worker_extension_cls="hardpoint.contracts.worker.WorkerBase",
        attention_backend="cpu_attn",
        seed=7,
        cpu_threads=3,
        shutdown_timeout=5,
        disable_sliding_window=True,
        served_model_name=["one", "two"],
        additional_config={"afd": {"role": "x"}},
        plugin_config=["toy.depth=3", "toy.name=a b", "other.nested.key=[1]"],
        plugin_policy="strict",
    )
    assert config.model_config.max_model_len == 256
    assert config.model_config.seed == 7
    assert config.model_config.served_model_name == "one"
    assert config.cache_config.block_size == 32
    assert config.cache_config.user_specified_block_size is True
    assert config.cache_config.enable_prefix_caching is False
    assert config.cache_config.gpu_memory_utilization == 0.5
    assert config.cache_config.kv_cache_memory_bytes == 1 << 20
    assert config.scheduler_config.policy == "priority"
    assert config.parallel_config.worker_extension_cls == "hardpoint.contracts.worker.WorkerBase"
    assert config.attention_config.backend == "CPU_ATTN"
    assert config.device_config.cpu_threads == 3
    assert config.shutdown_timeout == 5
    assert config.additional_config == {"afd": {"role": "x"}}
    assert config.plugins_config.policy == "strict"
    assert config.plugins_config.settings == {"toy": {"depth": 3, "name": "a b"}, "other": {"nested": {"key": [1]}}}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("HARDPOINT_PLUGIN_POLICY", "VLLM_LOGGING_LEVEL", "HARDPOINT_LOGGING_FORMAT", "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.delenv(name, raising=False)
    # Set by the arguments for child processes; monkeypatch only undoes what it has seen.
    monkeypatch.setenv("HARDPOINT_PLUGIN_POLICY", "compatible")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("HARDPOINT_LOGGING_FORMAT", "text")
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")


def test_budget_defaults_by_use(create):
    server, script = create("server"), create("LLM_CLASS")
    assert (server.scheduler_config.max_num_batched_tokens, server.scheduler_config.max_num_seqs) == (256, 128)
    assert (script.scheduler_config.max_num_batched_tokens, script.scheduler_config.max_num_seqs) == (2048, 256)
    assert server.scheduler_config.enable_chunked_prefill is True
    assert server.cache_config.enable_prefix_caching is True
    assert server.cache_config.block_size == 16


def test_budget_defaults_give_way_to_each_other(create):
    assert create(max_num_batched_tokens=64).scheduler_config.max_num_seqs == 64
    assert create(max_num_seqs=4000).scheduler_config.max_num_batched_tokens == 4000
    whole = create(enable_chunked_prefill=False, max_model_len=500)
    assert whole.scheduler_config.max_num_batched_tokens == 500
    with pytest.raises(ConfigError, match="at least max_num_seqs"):
        create(max_num_batched_tokens=64, max_num_seqs=65)
    with pytest.raises(ConfigError, match="it is a part of max_num_batched_tokens, 64"):
        create(max_num_batched_tokens=64, max_num_scheduled_tokens=65)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_num_seqs": -1}, "scheduler_config.max_num_seqs is -1"),
        ({"gpu_memory_utilization": 2.0}, "cache_config.gpu_memory_utilization is 2.0"),
        ({"scheduling_policy": "fifo"}, "expected one of fcfs, priority"),
        ({"plugin_config": ["toy"]}, "expected NAME.key=value"),
        ({"compilation_config": {"mod": 0}}, "compilation_config has no field 'mod'; did you mean mode"),
        ({"compilation_config": {"compile_sizes": [1]}}, "compiled for any size"),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "cudagraph_mode is FULL Fix: whole steps of decoding"),
        ({"logging_config": {"formatter": "xml"}}, "expected one of text, json"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "all of the 2 replicas are the server's own"),
        ({"distributed_executor_backend": "nowhere.Executor"}, "nowhere"),
        ({"scheduler_cls": "Scheduler"}, "scheduler_config.scheduler_cls is 'Scheduler': expected pkg.module.Class"),
        ({"worker_cls": "mod:Worker"}, "parallel_config.worker_cls"),
        ({"logits_processors": ["mod.Proc"]}, "mod.Proc"),
        ({"load_format": "pt"}, "'pt' is not supported yet"),
        ({"load_format": "safetensor"}, "did you mean safetensors"),
        ({"quantization": "ggu"}, "did you mean gguf"),
        ({"attention_backend": "FLASH"}, "attention backend 'FLASH' is not supported"),
        ({"dtype": "float8"}, "expected one of auto, half"),
        ({"model_class_overrides": {"A": "nocolon"}}, "nocolon"),
        ({"override_generation_config": {"temprature": 1}}, "unknown key 'temprature'; did you mean temperature"),
        ({"generation_config": "/no/such"}, "neither auto, vllm nor a folder"),
        ({"block_size": 0}, "cache_config.block_size is 0"),
        ({"hf_overrides": ["x"]}, "hf_overrides is ['x']: expected a mapping or a function"),
    ],
)
def test_impossible_values_are_one_clear_error(create, values, text):
    with pytest.raises(ConfigError) as caught:
        create(**values)
    assert text in str(caught.value)


def test_an_executor_class_must_be_one(create):
    with pytest.raises(TypeError, match="subclass of Executor"):
        create(distributed_executor_backend=dict)


def test_sections_may_be_given_as_objects_and_stay_the_callers(create):
    given = CompilationConfig(custom_ops=["+rms_norm"])
    config = create(compilation_config=given)
    assert config.compilation_config.custom_ops == ["+rms_norm", "all"]
    assert given.custom_ops == ["+rms_norm"]
    options = {"a": [1]}
    create(additional_config=options).additional_config["a"].append(2)
    assert options == {"a": [1]}


def test_logging_settings_reach_this_process_and_its_children(create, monkeypatch):
    import os

    config = create(logging_config={"formatter": "json"}, log_level="warning")
    assert config.logging_config == LoggingConfig(log_level="WARNING", formatter="json")
    assert os.environ["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert os.environ["HARDPOINT_LOGGING_FORMAT"] == "json"
    assert logging.getLogger("hardpoint").level == logging.WARNING
    create(log_level="info", logging_config={"formatter": "text"})
    assert logging.getLogger("hardpoint").level == logging.INFO


def test_hooks_run_before_anything_else(create, probe):
    create()
    assert probe.calls == [
        "pre_register_and_update()",
        "validate_environ",
        "apply_config_platform_defaults",
        "check_and_update_config",
    ]


def test_the_parser_hook_gets_the_parser(probe):
    from hardpoint.config.arguments import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    assert AsyncEngineArgs.add_cli_args(parser) is parser
    assert probe.calls == ["pre_register_and_update(parser)"]


def test_unknown_environment_variables(create, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_LOGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_PLUGIN_MINE", "1")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match="VLLM_LOGING_LEVEL is not known; did you mean VLLM_LOGGING_LEVEL"):
        create(fail_on_environ_validation=True)
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    create()
    assert "VLLM_LOGING_LEVEL is not known; did you mean VLLM_LOGGING_LEVEL" in caplog.text
    assert "VLLM_USE_MODELSCOPE is set, but this version does not read it" in caplog.text
    assert "VLLM_PLUGIN_MINE" not in caplog.text


def test_settings_of_plugins_reach_the_configuration_and_are_shown_nowhere(create):
    from hardpoint.extensions.ledger import ledger

    config = create(plugin_config={"acme": {"key": "s3cret", "depth": 3}})
    assert config.plugins_config.settings == {"acme": {"key": "s3cret", "depth": 3}}
    assert from_wire(to_wire(config)).plugins_config.settings["acme"]["depth"] == 3
    entries = ledger.entries(key="config")
    assert "plugins_config.settings.acme.key" in [entry.name for entry in entries]
    assert "s3cret" not in repr(config) + repr(EngineArgs(plugin_config=["acme.key=s3cret"])) + str(entries)
    with pytest.raises(ConfigError, match="has a value already"):
        create(plugin_config=["a.b=1", "a.b.c=2"])


def test_a_token_is_shown_nowhere(create):
    from hardpoint.extensions.ledger import ledger

    args = EngineArgs(hf_token="hf_secret")
    config = create(hf_token="hf_secret")
    assert config.model_config.hf_token == "hf_secret"
    shown = repr(args) + repr(config) + str([entry.detail for entry in ledger.entries(key="config")])
    assert "hf_secret" not in shown
