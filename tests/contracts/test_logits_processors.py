"""We ship no logits processor behind the plugins' door; the examples of both interfaces stand for them."""

from __future__ import annotations

from example_plugins import load_example

from hardpoint.testing import check_logits_processor, tiny_vllm_config
from hardpoint.types.sampling_params import SamplingParams


def test_the_example_with_slots():
    check_logits_processor(load_example("logits_processors").AcmeOnly, SamplingParams(extra_args={"acme_only": [5]}))


def test_the_example_with_rows():
    config = tiny_vllm_config(additional_config={"acme": {"ban": [5, 6]}})
    check_logits_processor(load_example("additional_config").AcmeBan, SamplingParams(), config)
