import json
import shutil
from pathlib import Path

import pytest
import torch
from acme_quantization_methods import register
from acme_quantization_methods.int8 import AcmeInt8Config
from safetensors.torch import load_file, save_file

from hardpoint.testing import check_project, check_quantization_config, engine_here
from hardpoint.testing.tiny_llama import tiny_model
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_quantization_methods": register}


def test_it_keeps_the_contract():
    check_quantization_config(AcmeInt8Config, close=0.02)


def kinds_and_logprobs(**arguments):
    """The number formats of the parameters, and the log-probabilities of one step."""
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=3)
    with engine_here(**arguments) as llm:
        kinds = {p.dtype for p in llm.apply_model(lambda model: list(model.parameters()))[0]}
        (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    return kinds, {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The tiny model with weights that are rounded in its files; returns what writes its config.json."""
    folder = tmp_path_factory.mktemp("stored") / "model"
    shutil.copytree(tiny_model(), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(dim=1) / 127
            tensors[name] = (tensor / scale[:, None]).round().to(torch.int8)
            tensors[name.replace("weight", "weight_scale")] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())

    def write(method):
        config["quantization_config"] = {"quant_method": method, "ignore": ["lm_head"]}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def test_a_plain_model_is_rounded_while_it_is_loaded(isolated_registries):
    plain, expected = kinds_and_logprobs()
    register()
    kinds, found = kinds_and_logprobs(quantization="acme_int8")
    assert torch.int8 in kinds - plain
    assert found == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize("method", ["acme_int8", "other_tool_int8"])
def test_a_rounded_checkpoint_says_the_same_also_under_another_name(isolated_registries, stored, method):
    register()
    _, expected = kinds_and_logprobs(quantization="acme_int8")
    kinds, found = kinds_and_logprobs(model=stored(method))
    assert torch.int8 in kinds
    assert found == pytest.approx(expected, abs=1e-4)
