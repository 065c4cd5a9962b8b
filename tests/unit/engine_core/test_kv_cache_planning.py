from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from engine_fakes import make_config

from hardpoint.contracts.kv_cache import (
    AttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    dtype_size_bytes,
    spec_of_layer,
)
from hardpoint.engine_core.kv_cache.manager import KVCacheManager
from hardpoint.engine_core.kv_cache.planning import DefaultKVCacheConfigBuilder, fit_max_model_len
from hardpoint.errors import ConfigError

FULL = FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16")
PAGE = 16 * 3 * 128 * 2


def build(specs: list[dict[str, KVCacheSpec]], memory: list[int], **config) -> list[KVCacheConfig]:
    settings = make_config(block_size=16, max_model_len=config.pop("max_model_len", 256))
    settings.scheduler_config.disable_hybrid_kv_cache_manager = not config.pop("hybrid", True)
    for name, value in config.items():
        setattr(settings.cache_config, name, value)
    return DefaultKVCacheConfigBuilder(settings).build(specs, memory)


# Specs.


def test_page_sizes():
    assert FULL.page_size_bytes == PAGE
    assert (
        FullAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, head_size_v=32, dtype="float32").page_size_bytes
        == 16 * 3 * 96 * 4
    )
    padded = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=2, dtype="int8", page_size_padded=64)
    assert padded.page_size_bytes == 64
    with pytest.raises(ValueError, match="smaller than the block"):
        FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=2, dtype="int8", page_size_padded=8).page_size_bytes  # noqa: B018


def test_storage_types_are_names():
    class TorchLike:
        def __str__(self) -> str:
            return "torch.float16"

    assert AttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=TorchLike()).dtype == "float16"
    assert dtype_size_bytes("float8_e4m3fn") == 1
    with pytest.raises(ValueError, match="unknown storage type 'float7'"):
        FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype="float7")


def test_a_copy_with_another_block_size_is_equal_otherwise():
    other = FULL.copy_with_new_block_size(32)
    assert other.block_size == 32
    assert other.copy_with_new_block_size(16) == FULL
    with pytest.raises(AttributeError):
        other.block_size = 1


@pytest.mark.parametrize(
    ("window", "step", "tokens", "blocks"),
    [(1, 1, 1000, 2), (16, 16, 1000, 3), (17, 16, 1000, 3), (500, 600, 1000, 63), (16, 16, 20, 2)],
)
def test_blocks_of_a_window(window, step, tokens, blocks):
    spec = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=1, dtype="int8", sliding_window=window)
    assert spec.blocks_held(tokens, step) == blocks


def test_merging_needs_equal_specs():
    assert KVCacheSpec.merge([FULL, FULL]) is FULL
    with pytest.raises(ValueError, match="must have the same spec"):
        KVCacheSpec.merge([FULL, FULL.copy_with_new_block_size(8)])


# Plans.


def test_one_tensor_per_layer():
    (plan,) = build([{"a": FULL, "b": FULL}], [2 * PAGE * 20 + 5])
    assert plan.num_blocks == 20
    assert [(tensor.layers, tensor.size, tensor.block_stride, tensor.offset) for tensor in plan.kv_cache_tensors] == [
        (["a"], 20 * PAGE, PAGE, 0),
        (["b"], 20 * PAGE, PAGE, 0),
    ]
    assert plan.kv_cache_groups == [KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=FULL)]
    assert plan.hash_block_size == 16


def test_all_workers_get_the_blocks_of_the_poorest():
    plans = build([{"a": FULL}, {"b": FULL}], [PAGE * 40, PAGE * 30])
    assert [plan.num_blocks for plan in plans] == [30, 30]
    assert [plan.kv_cache_groups[0].layer_names for plan in plans] == [["a"], ["b"]]


def test_layers_of_different_size_share_a_table():
    small = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bfloat16")
    (plan,) = build([{"a": FULL, "b": small}], [(PAGE + small.page_size_bytes) * 25])
    assert plan.num_blocks == 25
    assert [tensor.size for tensor in plan.kv_cache_tensors] == [25 * PAGE, 25 * small.page_size_bytes]
    (group,) = plan.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert spec_of_layer(group, "b") == small


WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16", sliding_window=32)


def test_each_kind_of_layer_has_groups_of_its_own_in_the_same_memory():
    layers = {f"l{i}": FULL if i % 3 == 2 else WINDOW for i in range(9)}
    (plan,) = build([layers], [3 * PAGE * 40 + 5])
    assert plan.num_blocks == 40
    assert [(group.layer_names, group.kv_cache_spec) for group in plan.kv_cache_groups] == [
        (["l0", "l3", "l6"], WINDOW), (["l1", "l4", "l7"], WINDOW), (["l2", "l5", "l8"], FULL),
    ]  # fmt: skip
    assert [(tensor.layers, tensor.size, tensor.layer_stride) for tensor in plan.kv_cache_tensors] == [
        (["l0", "l1", "l2"], 40 * PAGE, 0), (["l3", "l4", "l5"], 40 * PAGE, 0), (["l6", "l7", "l8"], 40 * PAGE, 0),
    ]  # fmt: skip


def test_groups_do_not_become_too_many():
    layers = {f"l{i}": FULL if i == 5 else WINDOW for i in range(26)}
    (plan,) = build([layers], [PAGE * 400])
    lengths = [len(group.layer_names) for group in plan.kv_cache_groups]
    assert lengths == [4, 4, 4, 4, 3, 3, 3, 1]
    assert plan.num_blocks == 100


def test_windowed_layers_are_stored_like_full_ones_where_groups_cannot_be():
    def specs_of(*workers, **options):
        plans = build(list(workers), [PAGE * 90] * len(workers), **options)
        assert all(len(plan.kv_cache_groups) == 1 for plan in plans)
        groups = [plan.kv_cache_groups[0] for plan in plans]
        return [spec_of_layer(group, name) for group in groups for name in group.layer_names]

    wide = replace(WINDOW, num_kv_heads=6)
    for found in (
        specs_of({"a": FULL, "b": WINDOW}, hybrid=False),
        # Blocks of different sizes, and a stage without full layers.
        specs_of({"a": FULL, "b": wide}),
        specs_of({"a": FULL, "b": WINDOW}, {"c": WINDOW}),
    ):
        assert all(isinstance(spec, FullAttentionSpec) for spec in found)
        assert found[1].sliding_window == 32
    (alone,) = build([{"b": WINDOW}], [PAGE * 50])
    assert alone.kv_cache_groups[0].kv_cache_spec == WINDOW


def test_layers_that_store_nothing_are_left_out():
    encoder = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16")
    (plan,) = build([{"a": FULL, "e": encoder}], [PAGE * 20])
    assert plan.kv_cache_groups[0].layer_names == ["a"]
    assert build([{"e": encoder}], [0])[0].kv_cache_groups == []
    assert build([{}], [0])[0].num_blocks == 1


def test_different_block_sizes_are_refused():
    with pytest.raises(ConfigError, match="FullAttentionSpec of 16 tokens and FullAttentionSpec of 8 tokens"):
        build([{"a": FULL, "b": FULL.copy_with_new_block_size(8)}], [PAGE * 50])


def test_workers_that_disagree_are_refused():
    with pytest.raises(ConfigError, match="disagree about the KV cache of layer a"):
        build([{"a": FULL}, {"a": FULL.copy_with_new_block_size(8)}], [PAGE * 50] * 2)


def test_too_little_memory_says_what_to_change():
    with pytest.raises(ConfigError, match=r"max_model_len=256 tokens needs 0\.20 MiB .* but 0\.12 MiB") as caught:
        build([{"a": FULL}], [PAGE * 10])
    for hint in (
        "--kv-cache-memory-bytes",
        "VLLM_CPU_KVCACHE_SPACE",
        "--gpu-memory-utilization",
        "--max-model-len to 144",
    ):
        assert hint in caught.value.fix
    # One block more than the request has: the null block.
    assert build([{"a": FULL}], [PAGE * 17])[0].num_blocks == 17
    with pytest.raises(ConfigError):
        build([{"a": FULL}], [PAGE * 16])
    with pytest.raises(ConfigError, match=r"but 0\.00 MiB are available") as caught:
        build([{"a": FULL}], [-5])
    assert "--max-model-len" not in caught.value.fix


def test_the_suggested_length_fits():
    assert build([{"a": FULL}], [PAGE * 10], max_model_len=144)[0].num_blocks == 10


def test_the_override_wins_and_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("hardpoint"), "propagate", True)
    assert build([{"a": FULL}], [PAGE * 100], num_gpu_blocks_override=40)[0].num_blocks == 40
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert build([{"a": FULL}], [PAGE * 100], num_gpu_blocks_override=5)[0].num_blocks == 5
    assert "below the 17 blocks of one request" in caplog.text
    build([{"a": FULL}], [PAGE * 20], num_gpu_blocks_override=40)
    assert "needs more memory than was found free" in caplog.text


def test_the_length_that_fits():
    def fitting(memory: int, spec: KVCacheSpec = FULL, **config) -> int:
        settings = make_config(block_size=16, max_model_len=1000)
        settings.cache_config.num_gpu_blocks_override = config.get("override")
        return fit_max_model_len(settings, [{"a": spec}], [memory])

    assert fitting(PAGE * 10) == 9 * 16
    assert fitting(PAGE * 1000) == 1000
    assert fitting(PAGE * 1000, override=11) == 160
    window = SlidingWindowSpec(block_size=16, num_kv_heads=3, head_size=64, dtype="bfloat16", sliding_window=16)
    assert fitting(PAGE * 10, window) == 1000
    with pytest.raises(ConfigError):
        fitting(PAGE)


# The manager over several groups, as a platform's builder may plan them.


def test_a_hit_must_hold_in_every_group(make_groups):
    manager, request_of = make_groups
    first = request_of(list(range(40)))
    hit, tokens = manager.get_computed_blocks(first)
    assert tokens == 0
    assert manager.allocate_slots(first, 40, 0, hit) is not None
    manager.free(first)
    hit, tokens = manager.get_computed_blocks(request_of([*range(40), 99]))
    assert tokens == 40
    assert [block.is_null for block in hit.blocks[1]] == [True] * 8 + [False] * 2
    # Without the window of the first 16 tokens in the second group there is no hit of 16 in the first either.
    manager.block_pool.uncache(manager.block_pool.blocks[block.block_id] for block in hit.blocks[1][8:])
    hit, tokens = manager.get_computed_blocks(request_of([*range(40), 99]))
    assert tokens == 32
    assert [len(blocks) for blocks in hit.blocks] == [8, 8]


@pytest.fixture
def make_groups():
    from engine_fakes import layer_spec, make_request

    from hardpoint.engine_core.kv_cache.hashing import block_hasher, hash_function
    from hardpoint.engine_core.request import Request

    groups = [
        KVCacheGroupSpec(layer_names=["full"], kv_cache_spec=layer_spec(4)),
        KVCacheGroupSpec(layer_names=["window"], kv_cache_spec=layer_spec(4, window=8)),
    ]
    plan = KVCacheConfig(num_blocks=60, kv_cache_tensors=[], kv_cache_groups=groups)
    hasher = block_hasher(4, hash_function("sha256"))
    numbers = iter(range(100))
    return KVCacheManager(plan, 64, 64), lambda prompt: Request.from_engine_core_request(
        make_request(f"r{next(numbers)}", prompt), hasher
    )
