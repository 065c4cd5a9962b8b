"""Published plugins that bring a model of their own on top of ours: registered whole by what they ship, and served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from downstream_packages import folder_of

SIZES: dict[str, Any] = {
    "torch_dtype": "float32", "vocab_size": 448, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "sliding_window": 32,
}  # fmt: skip
# What its layers are like is left to the config class that the plugin registers.
SPARK = {"architectures": ["Spark2_5ForCausalLM"], "model_type": "spark2_5", **SIZES}
KOLIBRI = {
    "architectures": ["Kolibri1ForCausalLM"], "model_type": "kolibri1", **SIZES,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
}  # fmt: skip

SCRIPT = """
import importlib.metadata, json, sys
from hardpoint import compat
assert compat.install()
for point in importlib.metadata.distribution(sys.argv[1]).entry_points:
    if point.group == "vllm.general_plugins":
        point.load()()
from vllm import LLM, SamplingParams
from vllm.tool_parsers import ToolParserManager
llm = LLM(sys.argv[2], load_format="dummy", max_model_len=64)
[answer] = llm.generate(["The quick"], SamplingParams(max_tokens=8, ignore_eos=True, temperature=0), use_tqdm=False)
model = llm.llm_engine.model_config
print(json.dumps({
    "tokens": len(answer.outputs[0].token_ids), "path": model.model_class.path,
    "layers": model.hf_config.layer_types, "parser": ToolParserManager.get_tool_parser(sys.argv[3]).__name__,
}))
"""


def served(plugin: str, parser: str, config: dict[str, Any], folder: Path, tiny_llama: Path) -> dict[str, Any]:
    """Serve a model without weights in a script of its own; what the script says of it."""
    for file in tiny_llama.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, plugin.partition("==")[0], str(folder), parser],
        env={
            "PYTHONPATH": str(folder_of(plugin)), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # A routing function of one plugin would be compiled, which takes longer than all the rest.
            "TORCHDYNAMO_DISABLE": "1",
        },
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{plugin}: {done.stderr}", pytrace=False)
    return json.loads(done.stdout.splitlines()[-1])


def test_spark_brings_its_config_class_its_parser_and_its_model(tiny_llama, tmp_path):
    found = served("vllm-spark2-5-plugin==0.1.0", "spark25", SPARK, tmp_path, tiny_llama)
    assert found["tokens"] == 8
    assert found["path"] == "vllm_spark2_5_plugin.spark2_5:Spark2_5ForCausalLM"
    assert found["layers"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert found["parser"] == "Spark2_5ToolParser"


def test_aleph_alpha_serves_its_mixture_of_experts(tiny_llama, tmp_path):
    found = served("aleph-alpha-inference==1.0.0", "kolibri1", KOLIBRI, tmp_path, tiny_llama)
    assert found["tokens"] == 8
    assert found["path"] == "aleph_alpha_inference.kolibri1:Kolibri1ForCausalLM"
    assert found["parser"] == "Hermes2ProToolParser"
