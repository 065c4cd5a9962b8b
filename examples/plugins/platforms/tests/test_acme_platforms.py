from pathlib import Path

import pytest
from acme_platforms import detect
from acme_platforms.attention import AcmeDeviceAttention
from acme_platforms.ops import AcmeDeviceRotary
from acme_platforms.platform import AcmePlatform
from acme_platforms.worker import AcmeDeviceWorker

from hardpoint import platforms
from hardpoint.testing import (
    boot_in_child,
    check_attention_backend,
    check_platform,
    check_project,
    check_worker,
    engine_here,
    project_plugin,
    tiny_vllm_config,
)
from hardpoint.types.sampling_params import SamplingParams

PROJECT = Path(__file__).parent.parent


@pytest.fixture
def active(isolated_registries):
    platforms.set_current_platform(AcmePlatform)
    yield
    platforms.reset_current_platform()


def test_its_entry_point(monkeypatch):
    assert check_project(PROJECT) == {"acme_platforms": detect}
    assert detect() is None
    monkeypatch.setenv("ACME_PLATFORM", "1")
    assert detect() == "acme_platforms.platform.AcmePlatform"


def test_it_keeps_the_contract(isolated_registries):
    check_platform(AcmePlatform, serves=True)


def test_its_parts_keep_theirs(active):
    check_attention_backend(AcmeDeviceAttention)
    check_worker(AcmeDeviceWorker)


def test_blocks_are_larger_unless_the_user_says_otherwise(active):
    assert tiny_vllm_config().cache_config.block_size == 32
    assert tiny_vllm_config(block_size=8).cache_config.block_size == 8


def test_what_it_cannot_do_is_refused(active, monkeypatch):
    with pytest.raises(ValueError, match="state-space"):
        AcmePlatform.verify_model_arch("MambaForCausalLM")
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "3")
    with pytest.raises(ValueError, match="there is one device"):
        tiny_vllm_config()
    with pytest.raises(AttributeError, match="get_atn_backend_cls"):
        _ = platforms.current_platform.get_atn_backend_cls


def test_a_model_says_the_same_on_it(isolated_registries):
    prompts = [{"prompt_token_ids": [1, 2, 3] * 20}, {"prompt_token_ids": [7]}]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def said():
        with engine_here() as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = llm.collective_rpc("acme_device")[0] if platforms.current_platform.device_name == "acme" else None
        return [list(output.outputs[0].token_ids) for output in outputs], found

    usual, _ = said()
    platforms.set_current_platform(AcmePlatform)
    try:
        before = AcmeDeviceRotary.turned
        found, device = said()
    finally:
        platforms.reset_current_platform()
    assert found == usual
    assert device["attention"] == ["AcmeDeviceAttentionImpl"]
    assert device["turned"] > before


def test_it_is_activated_where_it_applies(tmp_path):
    plugin = project_plugin(PROJECT, tmp_path)
    report = boot_in_child("worker", plugin.environment(ACME_PLATFORM="1"), groups=[])
    (entry,) = report.find("override", "acme_platforms", "platforms")
    assert entry.detail == "platform acme_platforms.platform.AcmePlatform"
