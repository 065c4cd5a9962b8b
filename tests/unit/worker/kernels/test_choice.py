"""Where a GGUF model computes in the kernels, and where a layer that somebody touched keeps torch."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.custom_op import op_registry_oot
from hardpoint.worker.kernels.packed import PackedWeight
from hardpoint.worker.layers import linear
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding
from hardpoint.worker.loaders import get_model

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCAB = 256, 4, 2, 512, 2, 96
TYPES = {
    "attn_q": "Q4_1",
    "attn_k": "Q8_0",
    "attn_v": "Q5_0",
    "attn_output": "Q4_0",
    "ffn_gate": "F16",
    "ffn_up": "Q5_1",
}


@pytest.fixture(scope="module")
def mixed_gguf(tmp_path_factory):
    """A small Llama whose fused layers have parts of different types."""
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    generator = np.random.default_rng(3)

    def add(name, kind, rows, columns):
        values = generator.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, stored), raw_dtype=stored)

    add("token_embd.weight", "Q8_0", VOCAB, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    key_size = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (key_size, HIDDEN),
        "attn_v": (key_size, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32))
        for name, shape in shapes.items():
            add(f"blk.{layer}.{name}.weight", TYPES.get(name, "Q4_1"), *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path, **options):
    options = {"skip_tokenizer_init": True, **options}
    return get_model(vllm_config=EngineArgs(model=str(path), **options).create_engine_config())


def layers_of(model):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, linear.LinearBase | VocabParallelEmbedding)
    }


def is_packed(layer) -> bool:
    return isinstance(layer.weight, PackedWeight)


def test_all_layers_compute_packed_and_agree_with_exact_ones(library, mixed_gguf):
    exact, packed = layers_of(load(mixed_gguf, dtype="float32")), layers_of(load(mixed_gguf))
    assert len(packed) == 4 * LAYERS + 2
    for name, layer in packed.items():
        assert is_packed(layer)
        assert not is_packed(exact[name])
        assert torch.equal(layer.quant_method.dequantize_weight(layer), exact[name].weight)
        x = torch.randn(5, layer.weight.shape[1])
        found, expected = (each.quant_method.apply(each, x) for each in (layer, exact[name]))
        # A layer did compute with rounded activations, or it would be equal.
        assert not torch.equal(found, expected)
        assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())
    ids = torch.tensor([3, 0, VOCAB - 1])
    assert torch.equal(packed["model.embed_tokens"](ids), exact["model.embed_tokens"](ids))
    assert packed["lm_head"].weight is packed["model.embed_tokens"].weight


def test_weights_stay_as_small_as_they_are_stored(library, mixed_gguf):
    layer = layers_of(load(mixed_gguf))["model.layers.0.mlp.down_proj"]
    (matrix,) = layer.weight.packed().matrices
    assert matrix.kind.name == "Q4_1"
    assert matrix.buffer.numel() == HIDDEN * INNER // 32 * 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_named_type_has_its_exact_arithmetic(library, mixed_gguf, dtype):
    layers = layers_of(load(mixed_gguf, dtype=dtype))
    assert not any(is_packed(layer) for layer in layers.values())
    assert {layer.weight.dtype for layer in layers.values()} == {getattr(torch, dtype)}


def test_without_kernels_torch_computes(monkeypatch, mixed_gguf):
    monkeypatch.setattr("hardpoint.worker.kernels.choice.kernels", lambda: None)
    assert not any(is_packed(layer) for layer in layers_of(load(mixed_gguf)).values())


def test_a_patched_layer_computes_as_patched(library, mixed_gguf, monkeypatch):
    seen = []
    original = linear.RowParallelLinear.forward

    def forward(self, input_):
        seen.append(self.prefix)
        return F.linear(input_, self.weight), None

    monkeypatch.setattr(linear.RowParallelLinear, "forward", forward)
    layers = layers_of(load(mixed_gguf))
    assert original is not forward
    for name, layer in layers.items():
        assert is_packed(layer) == (not isinstance(layer, linear.RowParallelLinear)), name
    layers["model.layers.1.mlp.down_proj"](torch.randn(2, INNER))
    assert seen == ["model.layers.1.mlp.down_proj"]


def test_a_patched_method_of_plain_weights_is_called(library, mixed_gguf, monkeypatch):
    calls = []

    def apply(self, layer, x, bias=None):
        calls.append(layer.prefix)
        return F.linear(x, layer.weight, bias)

    monkeypatch.setattr(linear.UnquantizedLinearMethod, "apply", apply)
    layers = layers_of(load(mixed_gguf))
    layer = layers["model.layers.0.self_attn.qkv_proj"]
    layer(torch.randn(2, HIDDEN))
    assert calls == [layer.prefix]


def test_a_replaced_layer_computes_itself(library, mixed_gguf, monkeypatch):
    @linear.QKVParallelLinear.register_oot
    class Mine(linear.QKVParallelLinear):
        def forward(self, input_):
            return F.linear(input_, self.weight) + 1, None

    try:
        layers = layers_of(load(mixed_gguf))
    finally:
        del op_registry_oot["QKVParallelLinear"]
    layer = layers["model.layers.0.self_attn.qkv_proj"]
    assert type(layer) is Mine
    assert not is_packed(layer)
    x = torch.randn(2, HIDDEN)
    assert torch.equal(layer(x)[0], F.linear(x, layer.weight) + 1)
    assert is_packed(layers["model.layers.0.self_attn.o_proj"])


def test_embeddings_and_head_stay_plain_when_one_of_them_is_touched(library, mixed_gguf, monkeypatch):
    monkeypatch.setattr(LogitsProcessor, "_project", staticmethod(lambda head, hidden, bias: hidden @ head.weight.T))
    layers = layers_of(load(mixed_gguf))
    assert not is_packed(layers["model.embed_tokens"])
    assert not is_packed(layers["lm_head"])
    assert is_packed(layers["model.layers.0.mlp.down_proj"])


def test_a_weight_can_be_read_and_replaced_but_not_changed_unseen(library, mixed_gguf):
    layer = layers_of(load(mixed_gguf))["model.layers.0.mlp.down_proj"]
    x, numbers = torch.randn(2, INNER), layer.weight + 0
    for change in (
        lambda: layer.weight.data.mul_(2),
        lambda: layer.weight.__setitem__(0, 1.0),
        lambda: layer.weight.zero_(),
    ):
        with pytest.raises(TypeError, match="--dtype float32"):
            change()
    assert torch.equal(layer.weight + 0, numbers)
    layer.weight = torch.nn.Parameter(2 * numbers, requires_grad=False)
    assert torch.allclose(layer(x)[0], F.linear(x, 2 * numbers), atol=1e-4)
