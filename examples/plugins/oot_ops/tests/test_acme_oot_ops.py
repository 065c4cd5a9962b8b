from pathlib import Path

import torch
from acme_oot_ops import register

from hardpoint.extensions.registry import registry
from hardpoint.testing import check_custom_op, check_project, engine_here
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.layers.layernorm import RMSNorm

PROJECT = Path(__file__).parent.parent


def op():
    register()
    from acme_oot_ops.ops import AcmeRMSNorm

    return AcmeRMSNorm


def test_its_entry_point():
    assert check_project(PROJECT) == {"acme_oot_ops": register}


def test_it_keeps_the_contract(isolated_registries):
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    check_custom_op(op(), RMSNorm, 16, inputs=(x,))
    check_custom_op(op(), RMSNorm, 16, inputs=(x, residual))


def test_models_run_it(isolated_registries):
    norm = op()
    if "RMSNorm" not in registry("oot_ops"):
        RMSNorm.register_oot(norm)
    before = norm.calls
    with engine_here() as llm:
        llm.generate([{"prompt_token_ids": [1, 2]}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert norm.calls > before
