"""Facts come from config.json or GGUF metadata, under Hugging Face's names, checked."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from transformers import LlamaConfig

from hardpoint.config.hf_config import HFConfig, complete
from hardpoint.config.model_facts import build_hf_config, choose_model_class, derived_max_model_len, read_facts
from hardpoint.config.sections import ModelConfig
from hardpoint.errors import ConfigError, ModelFileError, StartError
from hardpoint.extensions.registry import registry
from hardpoint.types.model_info import Inspection, ModelInfo


def facts(path, overrides=None):
    return build_hf_config(read_facts(path), overrides or {}, path)


def test_attribute_access_and_near_miss(llama_folder):
    config = facts(llama_folder(vision_config={"depth": 3}))
    assert config.hidden_size == 64
    assert config.vision_config.depth == 3
    assert config.get("nope", 7) == 7
    assert getattr(config, "nope", None) is None
    assert "hidden_size" in config
    with pytest.raises(AttributeError, match="no 'hidden_sise'; did you mean hidden_size"):
        _ = config.hidden_sise


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ],
)
def test_facts_equal_what_transformers_reads(llama_folder, rope):
    folder = llama_folder(rope_scaling=rope)
    theirs, ours = LlamaConfig.from_pretrained(folder), facts(folder)
    for name in (
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
        "vocab_size",
    ):
        assert getattr(ours, name) == getattr(theirs, name)
    expected = {"rope_type": "default", **theirs.rope_parameters}
    assert {key: ours.rope_parameters[key] for key in expected} == expected


def test_both_spellings_of_rope_are_there(llama_folder):
    old = facts(llama_folder(rope_scaling={"type": "linear", "factor": 4.0}))
    assert old.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
    new = facts(
        llama_folder(rope_theta=None, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
    )
    assert new.rope_theta == 1e6
    assert new.rope_scaling["rope_type"] == "yarn"


def test_defaults_of_the_kind_fill_in(llama_folder):
    config = facts(llama_folder(num_key_value_heads=None, rms_norm_eps=None, rope_theta=None))
    assert (config.num_key_value_heads, config.rms_norm_eps, config.rope_theta) == (4, 1e-6, 10000.0)
    assert config.tie_word_embeddings is False


def test_overrides_merge_deeply(llama_folder):
    folder = llama_folder(text_config={"hidden_size": 8, "num_hidden_layers": 2})
    config = facts(folder, {"text_config": {"hidden_size": 16}, "architectures": ["OtherModel"]})
    assert config.text_config.hidden_size == 16
    assert config.text_config.num_hidden_layers == 2
    assert config.architectures == ["OtherModel"]


def test_overriding_rope_in_either_spelling_wins(llama_folder):
    by_theta = facts(llama_folder(), {"rope_theta": 1e6})
    assert by_theta.rope_parameters["rope_theta"] == 1e6
    by_scaling = facts(llama_folder(), {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert by_scaling.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}
    by_parameters = facts(llama_folder(), {"rope_parameters": {"rope_type": "linear", "factor": 3.0}})
    assert by_parameters.rope_scaling == {"rope_type": "linear", "factor": 3.0, "rope_theta": 50000.0}


def test_unknown_override_is_named(llama_folder):
    with pytest.raises(ConfigError, match=r"--hf-overrides has the key 'hiden_size'.*did you mean hidden_size"):
        facts(llama_folder(), {"hiden_size": 8})


def test_a_plugin_model_may_have_keys_of_its_own(llama_folder, caplog):
    with registry("models").isolated() as models:
        models.register("ToyModel", "toy.models:ToyModel")
        config = facts(llama_folder(), {"architectures": ["ToyModel"], "toy_depth": 3})
    assert config.toy_depth == 3


def test_override_function_gets_the_config(llama_folder):
    def halve(config):
        config.num_hidden_layers //= 2
        return config

    assert facts(llama_folder(), halve).num_hidden_layers == 2
    with pytest.raises(ConfigError, match="must return the config"):
        facts(llama_folder(), lambda config: None)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": "64"}, "'hidden_size' in the model's config is '64'"),
        ({"num_attention_heads": 0}, "'num_attention_heads'"),
        ({"vocab_size": 2**60}, "'vocab_size'"),
        ({"architectures": None}, "names no model class"),
        ({"architectures": "LlamaForCausalLM"}, "names no model class"),
        ({"architectures": [None]}, "names no model class"),
    ],
)
def test_impossible_facts_name_the_field(llama_folder, changes, text):
    with pytest.raises(ModelFileError, match=text):
        facts(llama_folder(**changes))


@pytest.mark.parametrize("content", ["{", "[1]", "", "[" * 100_000, "\ufeff{}"])
def test_a_file_that_is_no_json_object_is_named(llama_folder, content):
    folder = llama_folder()
    (folder / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_facts(folder)


def test_folder_without_config_says_what_else_is_there(tmp_path):
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "m.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"one of its GGUF files: m\.Q4_0\.gguf"):
        read_facts(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelFileError, match="Mistral's own format"):
        read_facts(tmp_path)


def test_another_file_is_not_a_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelFileError, match="is not a model"):
        read_facts(tmp_path / "weights.bin")


# -- architecture ------------------------------------------------------------------------------------


@pytest.fixture
def choose(monkeypatch):
    """Choose among architectures; plugins' classes declare what `answers` says of them, or raise it."""
    answers: dict[str, Inspection | Exception] = {}

    def answer(entry):
        found = answers[entry.name]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("hardpoint.worker.models.registry.inspect_entry", answer)

    def run(architectures, overrides=None, **facts):
        model = ModelConfig(model="m", model_class_overrides=overrides or {})
        model.hf_config = HFConfig({"architectures": architectures, **facts})
        return choose_model_class(model)

    run.answers = answers
    with registry("models").isolated():
        yield run


def declaring(path="pkg.mod:Mine", remarks=(), **abilities):
    return Inspection(ModelInfo(path.partition(":")[2], **abilities), path, remarks)


def test_first_supported_architecture_is_chosen(choose):
    assert choose(["LlamaForCausalLM"]).architecture == "LlamaForCausalLM"
    assert choose(["Unknown", "LlamaForCausalLM"]).architecture == "LlamaForCausalLM"
    assert choose(["LlamaChatModel"]).architecture == "LlamaForCausalLM"
    choose.answers["Mine"] = declaring(is_text_generation_model=True, supports_pp=True)
    mine = choose(["Mine"], {"Mine": "pkg.mod:Mine"})
    assert (mine.architecture, mine.target, mine.path) == ("Mine", "pkg.mod:Mine", "pkg.mod:Mine")
    assert (mine.owner, mine.by_plugin) == ("model_class_overrides: Mine", True)
    assert mine.info["supports_pp"]


def test_unsupported_architecture_lists_what_is_supported(choose):
    with pytest.raises(ConfigError, match=r"\['LamaForCausal'\] are not supported.*\(did you mean LlamaForCausalLM"):
        choose(["LamaForCausal"])


def test_a_class_that_cannot_be_imported_gives_way_to_the_next(choose):
    registry("models").register("Mine", "pkg.mod:Mine")
    choose.answers["Mine"] = StartError("'pkg.mod:Mine': there is no module 'pkg'", fix="install it")
    assert choose(["Mine", "LlamaForCausalLM"]).architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match=r"\['Mine'\] failed to be inspected. Mine: 'pkg.mod:Mine': there is no m"):
        choose(["Mine"])
    choose.answers["Mine"] = declaring(is_text_generation_model=True)
    assert choose(["Mine"]).architecture == "Mine", "a failure is not remembered"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (declaring(remarks=("it lacks embed_input_ids(input_ids)",)), "it lacks embed_input_ids"),
        (declaring(), "it does not say that it generates text"),
    ],
)
def test_a_class_that_does_not_generate_text_is_refused_with_the_reason(choose, found, reason):
    registry("models").register("Mine", "pkg.mod:Mine")
    choose.answers["Mine"] = found
    with pytest.raises(ConfigError, match=rf"Mine \(pkg.mod:Mine\) does not support --runner generate: {reason}"):
        choose(["Mine", "LlamaForCausalLM"])


def test_repository_code_is_never_run(choose):
    auto_map = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    with pytest.raises(ConfigError, match="implemented only by code in the model's repository, which is never run"):
        choose(["XForCausalLM"], auto_map=auto_map)
    assert choose(["LlamaForCausalLM"], auto_map=auto_map).architecture == "LlamaForCausalLM"


# -- context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 256}, 256),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        (
            {
                "max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
            512,
        ),
        ({}, None),
    ],
)
def test_context_of_the_model(values, expected):
    assert derived_max_model_len(HFConfig(complete(values))) == expected


# -- GGUF --------------------------------------------------------------------------------------------


def test_gguf_facts_under_hugging_face_names(llama_gguf):
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 3}
    path = llama_gguf({**ids, "tokenizer.ggml.eot_token_id": 4, "general.sampling.temp": 0.5})
    config = facts(path)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "vocab_size": 128,
        "rope_theta": 50000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }
    assert {key: config.get(key) for key in expected} == expected
    assert math.isclose(config.rms_norm_eps, 1e-5, rel_tol=1e-6)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert read_facts(path).generation == {"temperature": 0.5, "eos_token_id": [2, 4]}


def test_gguf_with_output_tensor_and_biases(llama_gguf):
    row = np.zeros(64, dtype=np.float32)
    config = facts(
        llama_gguf(tensors={"output.weight": np.zeros((128, 64), dtype=np.float32), "blk.0.attn_q.bias": row})
    )
    assert config.tie_word_embeddings is False
    assert config.attention_bias is True


def test_gguf_head_counts(llama_gguf):
    assert facts(llama_gguf(drop=("attention.head_count_kv",))).num_key_value_heads == 4
    assert facts(llama_gguf({"llama.attention.key_length": 32})).head_dim == 32
    assert facts(llama_gguf({"llama.attention.head_count": [4, 4, 4, 4]})).num_attention_heads == 4
    with pytest.raises(ModelFileError, match=r"'llama\.attention\.head_count' is \[4, 2, 4, 4\]"):
        facts(llama_gguf({"llama.attention.head_count": [4, 2, 4, 4]}))
    partial = facts(llama_gguf({"llama.rope.dimension_count": 8}))
    assert partial.partial_rotary_factor == 0.5


def test_gguf_rope_scaling(llama_gguf):
    linear = facts(llama_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}))
    assert linear.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
    yarn = facts(
        llama_gguf(
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            }
        )
    )
    assert yarn.rope_parameters["original_max_position_embeddings"] == 128
    with pytest.raises(ModelFileError, match="rope scaling of type 'longrope' is not supported"):
        facts(llama_gguf({"llama.rope.scaling.type": "longrope"}))


def llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """As the converter of llama.cpp writes them for Llama 3."""
    low, high, old = 1.0, 4.0, 8192
    out = []
    for frequency in 1.0 / (theta ** (np.arange(0, head_dim, 2) / head_dim)):
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            out.append(1.0)
        elif wavelength > old / low:
            out.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_llama3_rope_is_recognised_from_its_divisors(llama_gguf, factor):
    divisors = llama3_divisors(500000.0, 16, factor)
    config = facts(llama_gguf({"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": divisors}))
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_gguf_other_rope_divisors_are_refused(llama_gguf):
    with pytest.raises(ModelFileError, match="not the rope scaling of Llama 3"):
        facts(llama_gguf(tensors={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"])
def test_gguf_without_a_needed_key_names_it(llama_gguf, key):
    with pytest.raises(ModelFileError, match=f"'llama.{key}' is missing"):
        facts(llama_gguf(drop=(key,)))


def test_gguf_of_another_kind_is_refused_by_name(llama_gguf):
    with pytest.raises(ModelFileError, match=r"architecture 'mamba' are not supported.*llama"):
        facts(llama_gguf(architecture="mamba"))
    with pytest.raises(ModelFileError, match="holds a adapter, not a model"):
        facts(llama_gguf({"general.type": "adapter"}))
    with pytest.raises(ModelFileError, match="with experts"):
        facts(llama_gguf({"qwen2.expert_count": 8}, architecture="qwen2"))
    with pytest.raises(ModelFileError, match=r"no tensor 'token_embd\.weight'"):
        facts(llama_gguf(drop=("token_embd.weight",)))


def test_generation_config_is_read(llama_folder):
    folder = llama_folder({"temperature": 0.3, "eos_token_id": [1, 2]})
    assert read_facts(folder).generation == {"temperature": 0.3, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text(json.dumps([1]))
    with pytest.raises(ModelFileError, match=r"generation_config\.json holds no JSON object"):
        read_facts(folder)
