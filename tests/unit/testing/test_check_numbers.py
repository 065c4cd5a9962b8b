"""Suites that compare numbers: attention backends, quantisation methods, ops and layers; and platforms."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from hardpoint.contracts.custom_op import op_registry_oot
from hardpoint.contracts.platform import Platform, PlatformEnum
from hardpoint.contracts.quantization import LinearMethodBase, QuantizationConfig
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.testing import (
    ContractFailure,
    check_attention_backend,
    check_custom_op,
    check_platform,
    check_pluggable_layer,
    check_quantization_config,
)
from hardpoint.worker.attention.cpu import CPUAttentionBackend, CPUAttentionImpl, CPUAttentionMetadataBuilder
from hardpoint.worker.attention.sdpa import TorchSDPABackend, TorchSDPAImpl
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.linear import RowParallelLinear
from hardpoint.worker.quantization.gguf import GGUFConfig

X = torch.randn(3, 16)


def attention(**members):
    return type("Bad", (CPUAttentionBackend,), {name: staticmethod(value) for name, value in members.items()})


def impl(**members):
    bad = type("BadImpl", (CPUAttentionImpl,), members)
    return attention(get_impl_cls=lambda: bad)


def scaled(self, layer, query, key, value, kv_cache, attn_metadata, output, *more):
    return CPUAttentionImpl.forward(self, layer, query * 1.1, key, value, kv_cache, attn_metadata, output, *more)


class Forgetful(TorchSDPAImpl):
    """Keeps no keys and values."""

    def _keep(self, key, value, kv_cache, slots):
        pass


class ForgetfulBackend(TorchSDPABackend):
    @staticmethod
    def get_impl_cls():
        return Forgetful


class Blind(CPUAttentionMetadataBuilder):
    """Takes every block table for 1, 2, 3, ..."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        table = torch.arange(1, 1 + common_attn_metadata.block_table_tensor.shape[1], dtype=torch.int32)
        rows = common_attn_metadata.block_table_tensor.shape[0]
        return super().build(0, common_attn_metadata.replace(block_table_tensor=table.repeat(rows, 1)))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_the_built_in_backend(dtype):
    check_attention_backend(CPUAttentionBackend, dtype=dtype)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (attention(get_name=lambda: "my attn"), "get_name gives 'my attn'"),
        (attention(get_impl_cls=lambda: dict), "does not derive from .*AttentionImplBase"),
        (attention(get_kv_cache_stride_order=lambda: (0, 1)), "for a cache of 5 dimensions"),
        (attention(get_kv_cache_stride_order=lambda: (0, 1, 2, 3, 4)), "does not begin with the blocks"),
        (attention(supports_block_size=lambda size: False), r"get_preferred_block_size\(16\) gives 16"),
        (attention(get_builder_cls=lambda: Blind), "differs by|computing a step raises"),
        (impl(forward=scaled), r"a prompt of tokens 0 to \d+ in blocks of \d+ differs by"),
        (ForgetfulBackend, "differs by"),
        (impl(__init__=lambda self, heads: None), "building its parts raises TypeError"),
    ],
)
def test_bad_backends(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_attention_backend(cls)


class Rounded(LinearMethodBase):
    """Keeps weights as int8 with a scale per output."""

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
                       params_dtype, **extra):  # fmt: skip
        weight = torch.zeros(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        for name, value in extra.items():
            setattr(layer.weight, name, value)

    def process_weights_after_loading(self, layer):
        layer.scale = layer.weight.abs().amax(1, keepdim=True) / 127
        layer.weight = nn.Parameter((layer.weight / layer.scale).round().to(torch.int8), requires_grad=False)

    def apply(self, layer, x, bias=None):
        return x @ (layer.weight.float() * layer.scale).T


class RoundedConfig(GGUFConfig):
    method: ClassVar[type] = Rounded

    def get_quant_method(self, layer, prefix):
        return self.method()


def quantised(**members):
    return type("BadConfig", (RoundedConfig,), members)


def method(**members):
    return quantised(method=type("BadMethod", (Rounded,), members))


def test_good_methods():
    check_quantization_config(GGUFConfig, close=1e-6)
    check_quantization_config(RoundedConfig, close=0.02)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (type("Bad", (QuantizationConfig,), {}), "does not implement from_config"),
        (quantised(get_min_capability=classmethod(lambda cls: "80")), "get_min_capability gives '80'"),
        (quantised(get_config_filenames=staticmethod(lambda: "x.json")), "get_config_filenames gives 'x.json'"),
        (quantised(from_config=classmethod(lambda cls, config: None)), "from_config gives None"),
        (quantised(get_supported_act_dtypes=lambda self: ["float32"]), "get_supported_act_dtypes gives"),
        (quantised(get_name=lambda self: ""), "get_name gives ''"),
        (quantised(__init__=lambda self: None), "has no packed_modules_mapping"),
        (quantised(get_quant_method=lambda self, layer, prefix: None), "building a linear layer raises ValueError"),
        (quantised(get_quant_method=lambda self, layer, prefix: object()), "building a linear layer raises"),
        (method(apply=lambda self, layer, x, bias=None: x), r"apply gives \(3, 64\)"),
        (method(apply=lambda self, layer, x, bias=None: x @ layer.weight.float().T), "differ by"),
    ],
)
def test_bad_methods(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_quantization_config(cls)


class MyNorm(RMSNorm):
    def forward_native(self, x, residual=None):
        return super().forward_native(x, residual)


def norm(**members):
    return type("BadNorm", (RMSNorm,), members)


def test_good_ops_and_layers():
    check_custom_op(MyNorm, RMSNorm, 16, inputs=(X,), eps=1e-6)
    check_custom_op(MyNorm, RMSNorm, 16, inputs=(X, torch.randn(3, 16)))
    half = norm(forward_native=lambda self, x, residual=None: x / 2)
    check_custom_op(half, RMSNorm, 16, inputs=(X,), close=None)
    check_pluggable_layer(type("Mine", (RowParallelLinear,), {}), RowParallelLinear, 16, 8, inputs=(X,))
    assert dict(op_registry_oot) == {}


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (nn.Linear, "does not derive from RMSNorm"),
        (RMSNorm, "does not derive from RMSNorm"),
        (norm(), "changes nothing"),
        (norm(__init__=lambda self, size: None), "building it where RMSNorm is asked for raises"),
        (norm(__init__=lambda self, size, eps=0: nn.Module.__init__(self)), "leaves out what the original one does"),
        (norm(forward_native=lambda self, x, residual=None: x), "its results differ by"),
        (norm(forward_native=lambda self, x, residual=None: x[0]), "it gives shapes"),
        (norm(forward_native=lambda self, x, residual=None: 1 / 0), "computing raises ZeroDivisionError"),
    ],
)
def test_bad_ops(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_custom_op(cls, RMSNorm, 16, inputs=(X,), eps=1e-6)


class Mine(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "mine"


def platform(**members):
    return type("BadPlatform", (Mine,), members)


def counts_up(cls, vllm_config):
    CpuPlatform.check_and_update_config.__func__(cls, vllm_config)
    vllm_config.scheduler_config.max_num_seqs += 1


def test_good_platforms():
    from hardpoint.platforms import current_platform

    check_platform(Mine, serves=True)
    assert isinstance(current_platform, CpuPlatform)


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (dict, "does not derive"),
        (type("Bad", (Platform,), {"device_name": "x", "device_type": "cpu"}), "it has no _enum"),
        (platform(device_type=""), "device_type is ''"),
        (type("Bad", (Platform,), {"_enum": PlatformEnum.OOT, "device_name": "x", "device_type": "cpu"}),
         "does not implement check_and_update_config"),
        (platform(supported_dtypes=property(lambda self: ["float32"])), "supported_dtypes is"),
        (platform(check_and_update_config=classmethod(lambda cls, config: None)), "making a configuration raises"),
        (platform(check_and_update_config=classmethod(counts_up)), "when they run a second time"),
        (platform(pre_register_and_update=classmethod(lambda cls, parser: None)), "with and without the parser"),
        (platform(get_attn_backend_cls=classmethod(lambda cls, *a, **k: "no.such.Backend")), "cannot be imported"),
        (platform(get_attn_backend_cls=classmethod(lambda cls, *a, **k: "")), "get_attn_backend_cls is ''"),
        (platform(import_kernels=classmethod(lambda cls, needed: None)), "cannot be called as the host"),
    ],
)  # fmt: skip
def test_bad_platforms(cls, what):
    with pytest.raises(ContractFailure, match=what):
        check_platform(cls)
