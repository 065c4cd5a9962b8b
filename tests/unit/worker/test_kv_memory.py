from types import SimpleNamespace

import pytest
import torch

from hardpoint.contracts.attention_backend import AttentionBackend
from hardpoint.contracts.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from hardpoint.errors import ConfigError
from hardpoint.worker.attention.cpu import CPUAttentionBackend
from hardpoint.worker.kv_memory import allocate_kv_cache

CPU = torch.device("cpu")
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
PAGE = SPEC.page_size_bytes
BLOCKS = 5


class HeadsFirst(AttentionBackend):
    """Another shape and order: blocks, heads, then keys beside values."""

    get_name = get_impl_cls = get_builder_cls = staticmethod(lambda: None)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return num_blocks, 2, num_kv_heads, block_size, head_size

    @staticmethod
    def get_kv_cache_stride_order():
        return 0, 2, 1, 3, 4


def plan(*tensors, names=("a", "b")):
    group = KVCacheGroupSpec(layer_names=list(names), kv_cache_spec=SPEC)
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=list(tensors), kv_cache_groups=[group])


def layers(backend=CPUAttentionBackend, names=("a", "b")):
    return {name: SimpleNamespace(get_attn_backend=lambda: backend) for name in names}


def separate(name):
    return KVCacheTensor(size=PAGE * BLOCKS, layers=[name], layer_stride=0, block_stride=PAGE)


def fill(cache, block_dim, value):
    """Write `value + block` into each block, through the layer's own view."""
    for block in range(BLOCKS):
        cache.select(block_dim, block).fill_(value + block)


@pytest.mark.parametrize(("backend", "block_dim"), [(CPUAttentionBackend, 1), (HeadsFirst, 0)])
def test_each_layer_gets_its_backends_shape(backend, block_dim):
    caches = allocate_kv_cache(plan(separate("a"), separate("b")), layers(backend), "auto", CPU)
    shape = backend.get_kv_cache_shape(BLOCKS, 4, 2, 8)
    assert {name: tuple(cache.shape) for name, cache in caches.items()} == {"a": shape, "b": shape}
    assert caches["a"].dtype is torch.float32
    fill(caches["a"], block_dim, 10)
    assert not caches["b"].any()
    assert [caches["a"].select(block_dim, block).unique().tolist() for block in range(BLOCKS)] == [
        [10.0 + block] for block in range(BLOCKS)
    ]


@pytest.mark.parametrize(("backend", "block_dim"), [(CPUAttentionBackend, 1), (HeadsFirst, 0)])
def test_layers_side_by_side_in_one_block_do_not_meet(backend, block_dim):
    # Block b holds layer a, then layer b: one stride over both.
    together = KVCacheTensor(size=2 * PAGE * BLOCKS, layers=["a", "b"], layer_stride=PAGE, block_stride=2 * PAGE)
    caches = allocate_kv_cache(plan(together), layers(backend), "auto", CPU)
    fill(caches["a"], block_dim, 10)
    fill(caches["b"], block_dim, 100)
    for name, value in (("a", 10.0), ("b", 100.0)):
        for block in range(BLOCKS):
            assert caches[name].select(block_dim, block).unique().tolist() == [value + block]
    start = caches["b"].data_ptr() - caches["a"].data_ptr()
    assert start == PAGE


def test_layers_that_share_memory_in_the_plan_share_it():
    shared = KVCacheTensor(size=PAGE * BLOCKS, layers=["a", "b"], layer_stride=0, block_stride=PAGE)
    caches = allocate_kv_cache(plan(shared), layers(), "auto", CPU)
    fill(caches["a"], 1, 3)
    assert torch.equal(caches["a"], caches["b"])


def test_a_plan_that_does_not_fit_the_model_is_refused():
    with pytest.raises(ValueError, match="'b', which the model does not have"):
        allocate_kv_cache(plan(separate("b")), layers(names=("a",)), "auto", CPU)
    small = KVCacheTensor(size=PAGE * BLOCKS, layers=["a"], layer_stride=0, block_stride=PAGE // 2)
    with pytest.raises(ValueError, match="numbers in a block"):
        allocate_kv_cache(plan(small), layers(), "auto", CPU)


def test_a_cache_that_no_machine_can_hold_is_refused_with_what_to_lower():
    huge = KVCacheTensor(size=1 << 62, layers=["a"], layer_stride=0, block_stride=PAGE)
    with pytest.raises(ConfigError, match=r"GiB, is more than this machine can allocate.*--kv-cache-memory-bytes"):
        allocate_kv_cache(plan(huge, names=("a",)), layers(names=("a",)), "auto", CPU)
