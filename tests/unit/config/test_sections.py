"""Sections check their values when made, and say which field breaks which rule."""

from __future__ import annotations

import dataclasses

import pytest

from hardpoint.config import sections
from hardpoint.config.sections import (
    CacheConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    ModelConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
    Section,
    from_mapping,
)
from hardpoint.config.sections.model import stage_layers
from hardpoint.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CacheConfig(block_size=0), "cache_config.block_size is 0: expected int >= 1"),
        (lambda: CacheConfig(gpu_memory_utilization=1.5), "cache_config.gpu_memory_utilization is 1.5"),
        (lambda: CacheConfig(gpu_memory_utilization=0), "cache_config.gpu_memory_utilization is 0"),
        (lambda: CacheConfig(enable_prefix_caching="yes"), "cache_config.enable_prefix_caching is 'yes'"),
        (lambda: ParallelConfig(tensor_parallel_size=0), "parallel_config.tensor_parallel_size is 0"),
        (lambda: ParallelConfig(tensor_parallel_size="2"), "parallel_config.tensor_parallel_size is '2'"),
        (lambda: SchedulerConfig.default_factory(watermark=1.0), "scheduler_config.watermark is 1.0"),
        (lambda: SchedulerConfig.default_factory(policy="fcsf"), "one of fcfs, priority; did you mean fcfs?"),
        (lambda: ModelConfig(max_model_len=-2), "model_config.max_model_len is -2: expected int >= -1"),
        (lambda: ModelConfig(max_logprobs=-2), "model_config.max_logprobs is -2"),
        (lambda: CompilationConfig(mode=7), "compilation_config.mode is 7: expected one of NONE"),
        (lambda: CompilationConfig(custom_ops=["rms_norm"]), "expected all, none, +name or -name"),
        (lambda: CompilationConfig(custom_ops=["+a", "-a"]), "both enables and disables 'a'"),
        (lambda: CompilationConfig(custom_ops=["all", "none"]), "both all and none"),
    ],
)
def test_impossible_values_name_the_field_and_the_rule(make, text):
    with pytest.raises(ConfigError) as caught:
        make()
    assert text in str(caught.value)


def test_every_section_can_be_made_with_defaults_or_names_what_it_needs():
    for name, kind in vars(sections).items():
        if not (isinstance(kind, type) and issubclass(kind, Section)) or kind in (Section, sections.VllmConfig):
            continue
        required = [
            f.name
            for f in dataclasses.fields(kind)
            if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if name == "SchedulerConfig":
            assert kind.default_factory().max_num_seqs == 128
        else:
            assert isinstance(kind(**dict.fromkeys(required, 1)), kind)


def test_token_budget_is_held_against_requests_and_context():
    with pytest.raises(ConfigError, match="must be at least max_num_seqs, 128"):
        SchedulerConfig.default_factory(max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="without chunked prefill"):
        SchedulerConfig.default_factory(max_model_len=4096, enable_chunked_prefill=False)
    assert SchedulerConfig.default_factory(max_model_len=4096).max_num_batched_tokens == 2048


def test_compilation_mode_and_graph_mode_take_name_number_and_member():
    for value in (0, "NONE", "none", CompilationMode.NONE):
        assert CompilationConfig(mode=value).mode is CompilationMode.NONE
    both = CompilationConfig(cudagraph_mode="FULL_AND_PIECEWISE").cudagraph_mode
    assert (both.decode_mode(), both.mixed_mode()) == (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)


def test_custom_op_switches():
    config = CompilationConfig(custom_ops=["none", "+rms_norm"])
    assert config.is_custom_op_enabled("rms_norm")
    assert not config.is_custom_op_enabled("silu_and_mul")
    assert CompilationConfig(custom_ops=["all", "-x"]).is_custom_op_enabled("y")
    assert not CompilationConfig(custom_ops=["all", "-x"]).is_custom_op_enabled("x")
    config.enable_custom_op("silu_and_mul")
    config.enable_custom_op("silu_and_mul")
    assert config.custom_ops == ["none", "+rms_norm", "+silu_and_mul"]


def test_world_size_follows_the_ranks():
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=2)
    assert (config.world_size, config.world_size_across_dp) == (6, 12)


def test_pooling_type_fills_the_field_it_belongs_to():
    assert PoolerConfig(pooling_type="MEAN").seq_pooling_type == "MEAN"
    assert PoolerConfig(pooling_type="ALL").tok_pooling_type == "ALL"


def test_from_mapping_builds_nested_sections_and_names_unknown_keys():
    config = from_mapping(CompilationConfig, {"mode": 0, "pass_config": {"eliminate_noops": False}})
    assert config.pass_config.eliminate_noops is False
    with pytest.raises(ConfigError, match=r"has no field 'custom_op'; did you mean custom_ops\?"):
        from_mapping(CompilationConfig, {"custom_op": []})
    with pytest.raises(ConfigError, match=r"compilation_config\.pass_config has no field 'fuse'"):
        from_mapping(CompilationConfig, {"pass_config": {"fuse": True}})
    with pytest.raises(ConfigError, match=r"compilation_config\.custom_ops is 'all'"):
        from_mapping(CompilationConfig, {"custom_ops": "all"})
    with pytest.raises(ConfigError, match="takes a mapping"):
        from_mapping(CompilationConfig, [1])
    with pytest.raises(ConfigError, match="has no field 'compilation_time'"):
        from_mapping(CompilationConfig, {"compilation_time": 1.0})


def test_layers_are_cut_into_stages_and_the_environment_may_say_how(monkeypatch):
    assert [stage_layers(8, stage, 2) for stage in range(2)] == [(0, 4), (4, 8)]
    sizes = [end - start for start, end in (stage_layers(10, stage, 4) for stage in range(4))]
    assert sum(sizes) == 10
    assert max(sizes) - min(sizes) == 1
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,5")
    assert stage_layers(8, 1, 2) == (3, 8)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,4")
    with pytest.raises(ConfigError, match="does not split 8 layers"):
        stage_layers(8, 0, 2)


def test_equal_sections_have_equal_hashes():
    assert CacheConfig().compute_hash() == CacheConfig().compute_hash()
    assert CacheConfig().compute_hash() != CacheConfig(block_size=32).compute_hash()
