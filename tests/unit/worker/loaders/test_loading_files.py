"""From files to models: what loads gives the right numbers, what does not fit is named."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.errors import ConfigError, ModelFileError
from hardpoint.extensions.registry import isolated
from hardpoint.worker.loaders import get_model, get_model_loader, register_model_loader
from hardpoint.worker.loaders.gguf_names import names_of

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load(path, **options):
    options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
    config = EngineArgs(model=str(path), **options).create_engine_config()
    return get_model(vllm_config=config)


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """A copy of the tiny model to damage."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def change(folder, **tensors):
    """Rewrite the weights; None takes a tensor away. Dots in names are written as double underscores."""
    weights = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, folder / "model.safetensors")


def state(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(one, other):
    one, other = state(one), state(other)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# Safetensors


def test_every_tensor_lands_in_its_place(tiny_llama):
    found = state(load(tiny_llama))
    stored = load_file(tiny_llama / "model.safetensors")
    prefix = "model.layers.1."
    qkv = torch.cat([stored[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([stored[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(found[f"{prefix}self_attn.qkv_proj.weight"], qkv)
    assert torch.equal(found[f"{prefix}mlp.gate_up_proj.weight"], gate_up)
    assert torch.equal(found["lm_head.weight"], stored["lm_head.weight"])
    assert torch.equal(found["model.norm.weight"], stored["model.norm.weight"])


def split(folder, names_of_second, index=True):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": {k: v for k, v in weights.items() if k not in names_of_second},
        "model-00002-of-00002.safetensors": {k: v for k, v in weights.items() if k in names_of_second},
    }
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    if index:
        weight_map = {tensor: name for name, tensors in parts.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return parts


@pytest.mark.parametrize("index", [True, False])
def test_several_files(index, folder, tiny_llama):
    split(folder, ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"], index)
    assert_same(load(folder), load(tiny_llama))


def test_half_precision_files_and_models(folder):
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(state(load(folder))["lm_head.weight"], weights["lm_head.weight"].float())
    assert state(load(folder, dtype="bfloat16"))["lm_head.weight"].dtype == torch.bfloat16


def refused(path, **options):
    with pytest.raises(ModelFileError) as caught:
        load(path, **options)
    return str(caught.value)


def test_a_missing_tensor_is_named(folder):
    change(folder, model__norm__weight=None)
    text = refused(folder)
    assert str(folder) in text
    assert "'model.norm.weight'" in text


def test_a_missing_part_of_a_fused_tensor_is_named(folder):
    change(folder, model__layers__1__self_attn__k_proj__weight=None)
    assert "'model.layers.1.self_attn.k_proj.weight'" in refused(folder)
    change(folder, model__layers__1__self_attn__q_proj__weight=None, model__layers__1__self_attn__v_proj__weight=None)
    assert "'model.layers.1.self_attn.q_proj.weight'" in refused(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (63,)),
        ("model.embed_tokens.weight", (449, 64)),
        ("model.embed_tokens.weight", (448, 63)),
        ("lm_head.weight", (447, 64)),
        ("model.layers.0.self_attn.q_proj.weight", (65, 64)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 65)),
        ("model.layers.0.self_attn.o_proj.weight", (64, 65)),
        ("model.layers.0.mlp.gate_proj.weight", (161, 64)),
        ("model.layers.0.mlp.down_proj.weight", (63, 160)),
        ("model.layers.0.input_layernorm.weight", (64, 1)),
    ],
)
def test_a_wrong_shape_is_named(name, shape, folder):
    change(folder, **{name.replace(".", "__"): torch.zeros(shape)})
    text = refused(folder)
    assert f"'{name}'" in text
    assert str(folder / "model.safetensors") in text
    assert str(shape) in text or str(tuple(shape)) in text


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "score.weight", "model.layers.9.mlp.x"])
def test_an_unknown_tensor_is_named(name, folder):
    change(folder, **{name.replace(".", "__"): torch.zeros(4)})
    assert f"'{name}'" in refused(folder)


def test_unused_rotary_tables_are_passed_over(folder, tiny_llama):
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
    assert_same(load(folder), load(tiny_llama))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -4])
def test_a_cut_file_is_named(keep, folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    assert str(path) in refused(folder)


def test_a_web_page_is_not_a_model(folder):
    (folder / "model.safetensors").write_text("<!DOCTYPE html><html>404</html>")
    assert "model.safetensors" in refused(folder)


def test_a_tensor_in_two_files_is_named(folder):
    parts = split(folder, ["lm_head.weight"], index=False)
    first, second = parts
    save_file({**parts[second], "model.norm.weight": parts[first]["model.norm.weight"]}, folder / second)
    text = refused(folder)
    assert "'model.norm.weight'" in text
    assert first in text
    assert second in text


def test_an_index_is_held_against_the_files(folder):
    split(folder, ["lm_head.weight"])
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]

    def with_map(text):
        index.write_text(text)
        return refused(folder)

    moved = {**weight_map, "model.norm.weight": "model-00002-of-00002.safetensors"}
    assert "'model.norm.weight'" in with_map(json.dumps({"weight_map": moved}))
    assert "no-such.safetensors" in with_map(json.dumps({"weight_map": {**weight_map, "x": "no-such.safetensors"}}))
    assert "../../etc/passwd" in with_map(json.dumps({"weight_map": {**weight_map, "x": "../../etc/passwd"}}))
    assert "weight_map" in with_map(json.dumps({"metadata": {}}))
    assert "weight_map" in with_map(json.dumps({"weight_map": []}))
    assert "not JSON" in with_map("{")


def test_pickled_and_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors file" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = refused(folder)
    assert "pytorch_model.bin" in text
    assert "pickled" in text


# GGUF


def write_gguf(folder, path, kind="F32", skip=(), extra=None):
    """Write the tiny model the way llama.cpp's converter does: rows of queries and keys reordered."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            stored = gguf_name(name)
            data = file.get_tensor(name)
            for part, count in heads.items():
                if part in name:
                    data = data.reshape(count, 2, data.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(data.shape)
            if stored in skip:
                continue
            matrix = kind != "F32" and data.ndim == 2
            type_ = gguf.GGMLQuantizationType[kind if matrix else "F32"]
            writer.add_tensor(stored, gguf.quantize(data, type_) if matrix else data, raw_dtype=type_)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name):
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}.{kind}"
    return f"{GGUF_NAMES[module]}.{kind}"


@pytest.mark.parametrize("biases", [False, True])
def test_a_gguf_file_gives_the_same_model(biases, make_tiny_llama, tmp_path):
    folder = make_tiny_llama(attention_bias=biases, mlp_bias=biases)
    assert_same(load(write_gguf(folder, tmp_path / "m.gguf")), load(folder))


def test_a_gguf_file_without_a_head_is_tied(make_tiny_llama, tmp_path):
    folder = make_tiny_llama(tie_word_embeddings=True)
    model = load(write_gguf(folder, tmp_path / "m.gguf"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(model, load(folder))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_gguf_files(kind, tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", kind)
    found = state(load(path))
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}

    def numbers(name):
        return torch.from_numpy(np.array(gguf.dequantize(stored[name].data, stored[name].tensor_type)))

    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], numbers("blk.1.ffn_down.weight"))
    assert torch.equal(found["model.embed_tokens.weight"], numbers("token_embd.weight"))
    keys = numbers("blk.0.attn_k.weight").reshape(2, 8, 2, 64).swapaxes(1, 2).reshape(32, 64)
    assert torch.equal(found["model.layers.0.self_attn.qkv_proj.weight"][64:96], keys)


def test_gguf_names_lead_both_ways():
    names = names_of("llama", with_experts=False)
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.12.self_attn.q_proj.bias"):
        assert names.model_names(names.stored_name(name)) == (name,)
    assert names.model_names("blk.0.ffn_gate_exps.weight") is None
    assert names.stored_name("model.layers.0.self_attn.qkv_proj.weight") == "model.layers.0.self_attn.qkv_proj.weight"


def test_missing_and_unknown_gguf_tensors_are_named_as_in_the_file(tiny_llama, tmp_path):
    text = refused(write_gguf(tiny_llama, tmp_path / "a.gguf", skip=["blk.1.attn_k.weight"]))
    assert "'blk.1.attn_k.weight'" in text
    assert "a.gguf" in text
    unknown = {"blk.0.attn_sub_norm.weight": np.zeros(64, np.float32)}
    assert "'blk.0.attn_sub_norm.weight'" in refused(write_gguf(tiny_llama, tmp_path / "b.gguf", extra=unknown))
    surplus = {"blk.7.attn_norm.weight": np.zeros(64, np.float32)}
    assert "'blk.7.attn_norm.weight'" in refused(write_gguf(tiny_llama, tmp_path / "c.gguf", extra=surplus))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("blk.0.attn_q.weight", (72, 64)), ("blk.0.attn_k.weight", (30, 64)), ("blk.1.ffn_down.weight", (64, 96))],
)
def test_a_wrong_gguf_shape_is_named(name, shape, tiny_llama, tmp_path):
    path = write_gguf(tiny_llama, tmp_path / "m.gguf", skip=[name], extra={name: np.zeros(shape, np.float32)})
    assert f"'{name}'" in refused(path)


def test_a_gguf_type_without_a_decoder_is_named(tiny_llama, tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(
        tiny_llama, path, skip=["blk.0.ffn_up.weight"], extra={"blk.0.ffn_up.weight": np.zeros((160, 64), np.int8)}
    )
    text = refused(path)
    assert "'blk.0.ffn_up.weight'" in text
    assert "I8" in text


def test_the_wrong_loader_for_a_file_is_refused(tiny_llama, tmp_path):
    with pytest.raises((ConfigError, ModelFileError), match=r"(?i)gguf"):
        load(write_gguf(tiny_llama, tmp_path / "m.gguf"), load_format="safetensors")


# Other loaders


def test_dummy_weights_are_small_and_always_the_same(folder):
    (folder / "model.safetensors").unlink()
    one, other = load(folder, load_format="dummy"), load(folder, load_format="dummy")
    assert_same(one, other)
    assert 0 < max(float(value.abs().max()) for value in state(one).values()) <= 1e-3


def test_options_a_loader_does_not_know_are_refused(tiny_llama):
    with pytest.raises(ConfigError, match="num_reader_threads"):
        load(tiny_llama, model_loader_extra_config={"num_reader_threads": 4})


def test_registered_loaders(tiny_llama, caplog):
    with isolated():

        @register_model_loader("constant")
        class ConstantLoader(BaseModelLoader):
            def download_model(self, model_config):
                pass

            def load_weights(self, model, model_config):
                for parameter in model.parameters():
                    parameter.fill_(self.load_config.model_loader_extra_config["value"])

        model = load(tiny_llama, load_format="constant", model_loader_extra_config={"value": 0.25})
        assert {float(value.mean()) for value in state(model).values()} == {0.25}
        assert not model.training
        with pytest.raises(ValueError, match="BaseModelLoader"):
            register_model_loader("broken")(dict)
        config = EngineArgs(model=str(tiny_llama), skip_tokenizer_init=True).create_engine_config().load_config
        object.__setattr__(config, "load_format", "nope")
        with pytest.raises(ValueError, match="Load format `nope` is not supported"):
            get_model_loader(config)
