from pathlib import Path

import torch
from acme_pluggable_layers import register

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_pluggable_layer, check_project, engine_here
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.layers.linear import RowParallelLinear

PROJECT = Path(__file__).parent.parent


def layer():
    register()
    from acme_pluggable_layers.layers import AcmeRowParallelLinear

    return AcmeRowParallelLinear


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_pluggable_layers": register}


def test_it_keeps_the_contract(isolated_registries):
    check_pluggable_layer(layer(), RowParallelLinear, 16, 8, inputs=(torch.randn(3, 16),))


def test_models_run_it(isolated_registries):
    linear = layer()
    if "RowParallelLinear" not in registry("pluggable_layers"):
        RowParallelLinear.register_oot(linear)
    linear.largest = 0.0
    with engine_here() as llm:
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert linear.largest > 0
