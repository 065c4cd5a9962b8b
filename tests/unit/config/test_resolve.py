"""Settling a configuration: steps, hooks, who wrote what, and what happens after it is sealed."""

from __future__ import annotations

import logging

import pytest

from hardpoint.config.draft import draft_of, writing
from hardpoint.config.resolve import STEPS, replace, settle_again
from hardpoint.config.sections import CompilationMode, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from hardpoint.config.wire import from_wire, to_wire
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.extensions.ledger import Origin, ledger
from hardpoint.extensions.registry import registry
from hardpoint.types.model_info import Inspection, ModelInfo


@pytest.fixture
def settle(probe):
    def make(path, **model):
        return VllmConfig(model_config=ModelConfig(model=str(path), **model))

    return make


@pytest.mark.parametrize("given", [{"revision": "v1"}, {"tokenizer_revision": "v1"}])
def test_what_is_on_this_machine_has_no_revisions(settle, llama_folder, given):
    (name,) = given
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-") + " is 'v1'.*no repository with revisions"):
        settle(llama_folder(), **given)


def test_a_tokenizer_of_another_revision_of_the_models_repository_is_fetched(settle, llama_folder, monkeypatch):
    folder, asked = llama_folder(), []

    def locate(name, hub):
        asked.append((name, hub.revision))
        return folder

    monkeypatch.setattr("hardpoint.config.resolve.locate", locate)
    settle("owner/repo", revision="v1")
    assert asked == [("owner/repo", "v1")]
    settle("owner/repo", revision="v1", tokenizer_revision="v2")
    assert asked[1:] == [("owner/repo", "v1"), ("owner/repo", "v2")]


@pytest.fixture
def log(caplog, monkeypatch):
    """Records of our loggers, which do not propagate once logging is set up."""
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    caplog.set_level(logging.INFO, logger="hardpoint")
    return caplog


def writes(path: str) -> list[str]:
    return [entry.detail for entry in ledger.entries(kind="config_write", key="config", name=path)]


# -- the model ---------------------------------------------------------------------------------------


def test_a_gguf_file_settles_itself(settle, llama_gguf):
    config = settle(llama_gguf({"tokenizer.ggml.eos_token_id": 2}))
    model = config.model_config
    assert (model.quantization, config.load_config.load_format) == ("gguf", "gguf")
    assert (model.max_model_len, model.dtype, model.architecture) == (512, "float32", "LlamaForCausalLM")
    assert model.local_path == model.tokenizer_path == model.model
    assert model.try_get_generation_config() == {"eos_token_id": [2]}
    assert (model.get_head_size(), model.get_total_num_kv_heads(), model.get_num_layers(config.parallel_config)) == (
        16,
        2,
        4,
    )


def test_a_gguf_file_refuses_another_quantisation(settle, llama_gguf):
    with pytest.raises(ConfigError, match="a GGUF file brings its own"):
        settle(llama_gguf(), quantization="awq")


def test_dummy_weights_stay_dummy(probe, llama_gguf):
    config = VllmConfig(model_config=ModelConfig(model=str(llama_gguf())), load_config=LoadConfig(load_format="dummy"))
    assert config.load_config.load_format == "dummy"


def test_a_checkpoint_with_an_unknown_quantisation_is_refused(settle, llama_folder):
    with pytest.raises(ConfigError, match="quantization 'awq' is not supported"):
        settle(llama_folder(quantization_config={"quant_method": "awq"}))
    with pytest.raises(ConfigError, match="the checkpoint says 'awq'"):
        settle(llama_folder(quantization_config={"quant_method": "awq"}), quantization="gguf")


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("float", "float32")]
)
def test_number_format(settle, llama_folder, asked, expected):
    model = settle(llama_folder(), dtype=asked).model_config
    assert (model.dtype, model.requested_dtype) == (expected, asked)


def test_context_is_the_models_unless_a_shorter_one_is_asked(settle, llama_folder, monkeypatch, log):
    folder = llama_folder()
    assert settle(folder).model_config.max_model_len == 512
    assert settle(folder, max_model_len=100).model_config.max_model_len == 100
    auto = settle(folder, max_model_len=-1).model_config
    assert (auto.max_model_len, auto.original_max_model_len) == (512, -1)
    with pytest.raises(ConfigError, match="the model was made for 512 tokens"):
        settle(folder, max_model_len=513)
    with pytest.raises(ConfigError, match="max_model_len is 0"):
        settle(folder, max_model_len=0)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert settle(folder, max_model_len=513).model_config.max_model_len == 513
    with pytest.raises(ConfigError, match="does not say how long"):
        settle(llama_folder(max_position_embeddings=None, model_type="other"))


def test_sliding_window_may_cap_the_context(settle, llama_folder):
    folder = llama_folder(sliding_window=128)
    assert settle(folder).cache_config.sliding_window == 128
    assert settle(folder, disable_sliding_window=True).model_config.max_model_len == 128


def test_generation_config(settle, llama_folder, tmp_path):
    folder = llama_folder({"temperature": 0.3, "max_new_tokens": 9, "eos_token_id": 5})
    assert settle(folder).model_config.get_diff_sampling_param() == {"temperature": 0.3, "max_tokens": 9}
    assert settle(folder, generation_config="vllm").model_config.get_diff_sampling_param() == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 3}')
    chosen = settle(folder, generation_config=str(other), override_generation_config={"top_p": 0.5}).model_config
    assert chosen.get_diff_sampling_param() == {"top_k": 3, "top_p": 0.5}


def test_another_tokenizer_is_located(settle, llama_folder, tmp_path):
    other = tmp_path / "tokenizer"
    other.mkdir()
    assert settle(llama_folder(), tokenizer=str(other)).model_config.tokenizer_path == str(other)
    assert settle(llama_folder(), skip_tokenizer_init=True).model_config.tokenizer_path == ""
    with pytest.raises(ModelFileError, match="no such file or folder"):
        settle(llama_folder(), tokenizer="/no/such/tokenizer")


def test_plugin_architectures_and_overrides(settle, llama_folder, monkeypatch):
    found = Inspection(ModelInfo("Toy", is_text_generation_model=True), "toy.models:Toy")
    monkeypatch.setattr("hardpoint.worker.models.registry.inspect_entry", lambda entry: found)
    with registry("models").isolated() as models:
        models.register("ToyModel", "toy.models:ToyModel")
        toy = settle(llama_folder(), hf_overrides={"architectures": ["ToyModel"]})
        assert toy.model_config.architecture == "ToyModel"
        second = settle(llama_folder(architectures=["Unknown", "ToyModel"]))
        assert second.model_config.architectures == ["ToyModel", "Unknown"]
        overridden = settle(llama_folder(architectures=["Mine"]), model_class_overrides={"Mine": "my.models:Mine"})
        assert overridden.model_config.architecture == "Mine"
        assert overridden.model_config.model_class.path == "toy.models:Toy"


def test_the_model_class_is_chosen_once(settle, llama_folder, monkeypatch):
    found = Inspection(ModelInfo("Toy", is_text_generation_model=True), "toy.models:Toy")
    monkeypatch.setattr("hardpoint.worker.models.registry.inspect_entry", lambda entry: found)
    with registry("models").isolated() as models:
        models.register("Toy", "toy.models:Toy")
        sent = to_wire(settle(llama_folder(architectures=["Toy"])))
    monkeypatch.undo()
    with registry("models").isolated() as models:
        # Its start script registered it: the other process takes it over, and does not ask again.
        config = from_wire(sent)
        settle_again(config)
        assert models.entry("Toy").ref == "toy.models:Toy"
        assert config.model_config.model_class.path == "toy.models:Toy"
        assert not config.model_config.is_pp_supported
    with registry("models").isolated() as models:
        config.model_config.model_class.by_plugin = True
        with pytest.raises(ConfigError, match=r"the front end found model class Toy .*this process has no such"):
            settle_again(config)


def test_heads_must_divide_among_ranks(llama_folder):
    model = VllmConfig(model_config=ModelConfig(model=str(llama_folder()))).model_config
    parallel = type("P", (), {"tensor_parallel_size": 3, "pipeline_parallel_size": 1})()
    with pytest.raises(ConfigError, match="must divide the 4 attention heads"):
        model.verify_with_parallel_config(parallel)


# -- defaults ----------------------------------------------------------------------------------------


def test_without_a_compiler_custom_ops_are_all_on(settle, llama_folder):
    config = settle(llama_folder())
    assert config.compilation_config.mode is CompilationMode.NONE
    assert config.compilation_config.custom_ops == ["all"]
    assert config.parallel_config.distributed_executor_backend == "uni"
    assert config.parallel_config.worker_cls == "hardpoint.worker.device_worker.Worker"
    assert config.scheduler_config.async_scheduling is False
    assert config.device_config.device_type == "cpu"
    assert len(config.instance_id) == 8


def test_a_configuration_without_a_model_settles_too(probe):
    config = VllmConfig()
    assert config.cache_config.block_size == 16
    assert config.is_settled


def test_sections_of_features_that_are_missing_are_refused(probe):
    from hardpoint.config.sections import SpeculativeConfig

    with pytest.raises(ConfigError, match="speculative decoding is not supported yet"):
        VllmConfig(speculative_config=SpeculativeConfig(method="ngram"))


def test_token_budget_is_checked_against_the_models_context(probe, llama_folder):
    scheduler = SchedulerConfig.default_factory(
        max_model_len=1, max_num_batched_tokens=256, enable_chunked_prefill=False
    )
    with pytest.raises(ConfigError, match="the longest prompt, 512 tokens"):
        VllmConfig(model_config=ModelConfig(model=str(llama_folder())), scheduler_config=scheduler)


# -- hooks and attribution ---------------------------------------------------------------------------


def test_hooks_run_in_order_around_the_decisions(settle, probe, llama_folder):
    seen = {}
    probe.defaults = staticmethod(lambda config: seen.update(before=list(config.compilation_config.custom_ops)))
    probe.check = staticmethod(lambda config: seen.update(after=list(config.compilation_config.custom_ops)))
    settle(llama_folder())
    assert seen == {"before": [], "after": ["all"]}


def test_a_platform_may_choose_the_base_of_custom_ops(settle, probe, llama_folder):
    probe.defaults = staticmethod(lambda config: config.compilation_config.custom_ops.append("none"))
    assert settle(llama_folder()).compilation_config.custom_ops == ["none"]


def test_each_write_is_attributed_to_its_step(settle, probe, llama_folder):
    ledger_before = len(writes("parallel_config.worker_cls"))

    def check(config):
        config.parallel_config.worker_cls = "toy.worker.Worker"
        config.compilation_config.custom_ops.append("+toy")

    probe.check = staticmethod(check)
    config = settle(llama_folder())
    assert config.parallel_config.worker_cls == "toy.worker.Worker"
    (write,) = writes("parallel_config.worker_cls")[ledger_before:]
    assert write == "'auto' -> 'toy.worker.Worker' in step 'let the platform check'"
    assert writes("compilation_config.custom_ops")[-1] == "['all'] -> ['all', '+toy'] in step 'let the platform check'"
    assert writes("model_config.dtype")[-1] == "'auto' -> 'float32' in step 'choose the number format'"


def test_a_platform_that_sets_no_worker_is_named(settle, probe, llama_folder, monkeypatch):
    monkeypatch.setattr(probe, "check_and_update_config", classmethod(lambda cls, config: None))
    with pytest.raises(ConfigError, match=r"platform Probe did not set parallel_config\.worker_cls"):
        settle(llama_folder())


def test_a_hook_that_raises_stops_with_its_own_error(settle, probe, llama_folder):
    def fail(config):
        raise RuntimeError("no device")

    probe.check = staticmethod(fail)
    with pytest.raises(RuntimeError, match="no device"):
        settle(llama_folder())


def test_settling_again_changes_nothing(settle, llama_folder):
    config = from_wire(to_wire(settle(llama_folder())))
    before = to_wire(config)
    config.__post_init__()
    assert to_wire(config) == before


def test_a_hook_whose_second_run_changes_something_is_reported(settle, probe, llama_folder, log):
    probe.check = staticmethod(lambda config: config.compilation_config.custom_ops.append("+toy"))
    config = from_wire(to_wire(settle(llama_folder())))
    assert "changed" not in log.text
    config.__post_init__()
    assert "Probe changed compilation_config.custom_ops again" in log.text


def test_a_write_after_sealing_works_and_is_reported(settle, llama_folder, log):
    config = settle(llama_folder())
    config.scheduler_config.max_num_seqs = 3
    assert config.scheduler_config.max_num_seqs == 3
    assert "scheduler_config.max_num_seqs is set to 3 after the configuration was sealed" in log.text
    assert __name__ in log.text
    assert writes("scheduler_config.max_num_seqs")[-1] == "128 -> 3 in step 'after sealing'"


@pytest.fixture
def acme():
    """Code of a loaded plugin: `acme(source)` defines functions in a module of its own."""
    origin = Origin(distribution="acme", version="1.0", module="acme")
    ledger.know_package("acme", origin)

    def define(source: str):
        namespace: dict = {"__name__": "acme.patches", "VllmConfig": VllmConfig, "original": VllmConfig.__post_init__}
        exec(source, namespace)
        return namespace

    yield define
    ledger._roots.pop("acme")


def authors(path: str) -> list[str]:
    return [entry.origin.label for entry in ledger.entries(kind="config_write", key="config", name=path)]


def test_a_plugin_around_the_config_check_answers_for_its_own_writes_only(settle, llama_folder, acme, monkeypatch, log):
    patches = acme("""
def patched(config):
    config.parallel_config.worker_cls = "hardpoint.contracts.worker.WorkerBase"
    original(config)
    config.scheduler_config.max_num_seqs = 3
""")
    monkeypatch.setattr(VllmConfig, "__post_init__", patches["patched"])
    ledger_before = len(ledger.entries())
    config = settle(llama_folder())
    assert (config.parallel_config.worker_cls, config.scheduler_config.max_num_seqs) == (
        "hardpoint.contracts.worker.WorkerBase",
        3,
    )
    assert authors("parallel_config.worker_cls")[-1] == authors("scheduler_config.max_num_seqs")[-1] == "acme 1.0"
    assert (
        writes("parallel_config.worker_cls")[-1] == "'auto' -> 'hardpoint.contracts.worker.WorkerBase' before the steps"
    )
    assert writes("scheduler_config.max_num_seqs")[-1] == "128 -> 3 in step 'outside the steps'"
    assert authors("compilation_config.custom_ops")[-1] == authors("model_config.dtype")[-1] == "built in"
    theirs = [e for e in ledger.entries()[ledger_before:] if e.origin.distribution == "acme"]
    assert len(theirs) == 2
    assert "sealed" not in log.text, "the configuration is not finished before the patch is"


def test_a_late_write_says_who_does_not_see_it(settle, llama_folder, acme, log):
    late = acme("def late(config):\n    config.scheduler_config.max_num_seqs -= 1\n")["late"]
    config = settle(llama_folder())
    late(config)
    assert "after the configuration was sealed, by acme 1.0; what was derived from the old value stays" in log.text
    to_wire(config)
    late(config)
    assert "is set to 126 after the configuration was sealed, by acme 1.0; other processes do not see it" in log.text


def test_a_second_process_settles_and_seals_again(settle, llama_folder):
    config = from_wire(to_wire(settle(llama_folder())))
    assert draft_of(config) is None
    settle_again(config)
    assert draft_of(config).sealed


def test_results_of_the_running_engine_are_no_news(settle, llama_folder, log):
    config = settle(llama_folder())
    config.cache_config.num_gpu_blocks = 7
    config.compilation_config.static_forward_context["layer"] = object()
    with writing(config, "fit the context"):
        config.model_config.max_model_len = 10
    assert "sealed" not in log.text
    assert writes("model_config.max_model_len")[-1] == "512 -> 10 in step 'fit the context'"
    assert draft_of(config).sealed


def test_replace_settles_the_copy(settle, probe, llama_folder):
    config = settle(llama_folder())
    probe.calls.clear()
    changed = replace(config, load_config=LoadConfig(load_format="dummy"))
    assert changed.load_config.load_format == "dummy"
    assert config.load_config.load_format == "auto"
    assert probe.calls == ["apply_config_platform_defaults", "check_and_update_config"]
    with pytest.raises(ConfigError, match="no field 'lod_config'"):
        replace(config, lod_config=None)


def test_steps_have_names_of_their_own():
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert [step.name for step in STEPS if step.hook] == ["let the platform set defaults", "let the platform check"]
