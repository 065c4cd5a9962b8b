from pathlib import Path

import numpy as np
import pytest
from acme_model_loaders import register
from acme_model_loaders.npz import AcmeNpzLoader
from safetensors.numpy import load_file

from hardpoint.errors import ModelFileError
from hardpoint.testing import check_model_loader, check_project, engine_here, write_tiny_llama
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent


@pytest.fixture
def checkpoint(tmp_path):
    """The tiny model with its weights in the other format."""
    write_tiny_llama(tmp_path)
    np.savez(tmp_path / "weights.npz", **load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_model_loaders": register}


def test_it_keeps_the_contract(checkpoint):
    check_model_loader(AcmeNpzLoader, checkpoint)


def test_the_model_is_the_same(isolated_registries, checkpoint, tiny_model):
    register()
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    said = []
    for model, load_format in ((tiny_model, "auto"), (checkpoint, "acme_npz")):
        with engine_here(model, load_format=load_format) as llm:
            said.append(llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)[0].outputs[0].token_ids)
    assert list(said[0]) == list(said[1])


def test_a_missing_file_is_named(isolated_registries, tiny_model):
    register()
    missing = pytest.raises(ModelFileError, match=r"weights\.npz does not exist")
    with missing, engine_here(tiny_model, load_format="acme_npz"):
        pass
