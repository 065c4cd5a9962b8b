"""The real model's log-probabilities, held against the reference of the golden file."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from hardpoint.worker.kernels.packed import PackedWeight

GOLDEN = Path(__file__).parents[3] / "golden" / "smollm2_greedy.json"


def worst_difference(model) -> float:
    cases = json.loads(GOLDEN.read_text())["cases"]
    assert len(cases) == 13
    worst = 0.0
    for case in cases:
        start = len(case["prompt_ids"]) - 1
        found = model.whole(case["prompt_ids"] + case["generated_ids"]).log_softmax(-1)
        for step, top in enumerate(case["top5"]):
            ids, expected = zip(*top, strict=True)
            worst = max(worst, float((found[start + step, list(ids)] - torch.tensor(expected)).abs().max()))
            assert found[start + step].argmax() == ids[0] or expected[0] - expected[1] < 0.05
    return worst


def test_top_five_log_probabilities_agree(smollm2_gguf, paged_model):
    # Agreed is 0.02; two independent implementations agree to 1e-4.
    assert worst_difference(paged_model(smollm2_gguf)) < 1e-3


def test_rounded_activations_stay_close(smollm2_gguf, paged_model):
    model = paged_model(smollm2_gguf, dtype="auto")
    assert isinstance(model.model.lm_head.weight, PackedWeight)
    # Not zero: the kernels did compute.
    assert 1e-3 < worst_difference(model) < 0.15
