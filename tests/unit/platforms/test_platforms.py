"""Which platform is chosen, and what a platform says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hardpoint import platforms
from hardpoint.config.sections import ModelConfig, VllmConfig
from hardpoint.contracts.platform import CpuArchEnum, Platform, PlatformEnum, UnspecifiedPlatform
from hardpoint.errors import ConfigError
from hardpoint.platforms import cpu, detect, memory
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.platforms.cuda import CudaPlatform


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    platforms.reset_current_platform()
    yield
    platforms.reset_current_platform()


class Toy(CpuPlatform):
    _enum = PlatformEnum.OOT
    device_name = "toy"


def test_a_cpu_is_found_without_importing_torch():
    code = (
        "import sys; from hardpoint.platforms import current_platform as p; print(p.is_cpu(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"VLLM_TARGET_DEVICE": "cpu"}
    )
    assert done.stdout.split() == ["True", "False"]


def test_cuda_wins_where_driver_and_torch_have_it(monkeypatch):
    monkeypatch.setattr(detect, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(detect, "has_cuda_torch", lambda: True)
    assert (detect.cuda_platform(), detect.cpu_platform()) == (detect.CUDA, None)
    assert isinstance(platforms.current_platform, CudaPlatform)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert (detect.cuda_platform(), detect.cpu_platform()) == (None, detect.CPU)


def test_a_driver_without_a_torch_for_it_is_a_cpu(monkeypatch):
    monkeypatch.setattr(detect, "has_nvidia_device", lambda: True)
    monkeypatch.setattr(detect, "has_cuda_torch", lambda: False)
    assert (detect.cuda_platform(), detect.cpu_platform()) == (None, detect.CPU)


def test_asking_for_a_device_that_is_not_there_leaves_none(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.setattr(detect, "has_nvidia_device", lambda: False)
    assert isinstance(platforms.current_platform, UnspecifiedPlatform)
    with pytest.raises(ConfigError, match="no device was found"):
        platforms.current_platform.check_and_update_config(None)


def test_hidden_devices_do_not_count(monkeypatch):
    monkeypatch.setattr(detect, "_DEVICE_FILES", ("/dev/null",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert detect.has_nvidia_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not detect.has_nvidia_device()


def test_the_choice_is_made_once_and_can_be_replaced(monkeypatch):
    first = platforms.current_platform
    assert platforms.current_platform is first
    platforms.set_current_platform(Toy)
    assert platforms.current_platform.device_name == "toy"
    assert platforms.current_platform.is_out_of_tree()
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = platforms.other


def test_a_class_that_is_no_platform_is_refused(monkeypatch):
    monkeypatch.setattr(platforms, "resolve_platform_cls_qualname", lambda detectors: "collections.OrderedDict")
    with pytest.raises(TypeError, match="not a subclass of"):
        _ = platforms.current_platform


def test_a_misspelled_member_is_an_attribute_error():
    for target in (Toy, Toy()):
        with pytest.raises(AttributeError, match="platform Toy has no attribute 'check_and_updat_config'"):
            _ = target.check_and_updat_config


def test_what_torch_has_for_the_device_is_passed_on():
    import torch

    assert Toy().synchronize is torch.cpu.synchronize
    assert Toy.current_stream is torch.cpu.current_stream


def test_methods_a_platform_must_give_say_their_name():
    class Bare(Platform):
        _enum = PlatformEnum.OOT
        device_name = device_type = "bare"

    for name in ("get_device_name", "get_device_total_memory", "get_punica_wrapper"):
        with pytest.raises(NotImplementedError, match=f"Bare does not say {name}"):
            getattr(Bare, name)()
    assert Bare.get_attn_backend_cls(None, None) == ""
    assert Bare.default_dtype("float32") == "float16"
    assert Bare.default_dtype("bfloat16") == "bfloat16"
    assert Bare.get_infinity_values("x") == (float("-inf"), float("inf"))


def test_quantisation_list_is_held():
    class Picky(Toy):
        supported_quantization = ["gguf"]

    Picky.verify_quantization("gguf")
    with pytest.raises(ValueError, match=r"'awq' is not supported on toy.*gguf"):
        Picky.verify_quantization("awq")
    Toy.verify_quantization("anything")


def test_device_variable_maps_positions(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert CudaPlatform.device_control_id_to_physical_device_id(1) == 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc")
    with pytest.raises(ConfigError, match="GPU-abc"):
        CudaPlatform.device_control_id_to_physical_device_id(0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert CudaPlatform.device_control_id_to_physical_device_id(3) == 3


def test_cpu_facts():
    assert CpuPlatform.get_device_name()
    assert 0 < CpuPlatform.get_current_memory_usage() < CpuPlatform.get_device_total_memory()
    assert CpuPlatform.num_compute_units() >= 1
    assert CpuPlatform.get_cpu_architecture() in CpuArchEnum
    assert not CpuPlatform.has_device_capability(80)
    CpuPlatform.check_if_supports_dtype("bfloat16")
    with pytest.raises(ConfigError, match="float8"):
        CpuPlatform.check_if_supports_dtype("float8")


def test_attention_backend_by_name():
    from torch import float32

    from hardpoint.contracts.attention_backend import AttentionSelectorConfig

    facts = AttentionSelectorConfig(head_size=64, dtype=float32, kv_cache_dtype="auto", block_size=16)
    ours = CpuPlatform.get_attn_backend_cls(None, facts)
    assert ours == "hardpoint.worker.attention.cpu.CPUAttentionBackend"
    assert CpuPlatform.get_attn_backend_cls("CPU_ATTN", facts) == ours
    with pytest.raises(KeyError):
        CpuPlatform.get_attn_backend_cls("NOPE", facts)


# -- size of the KV cache ----------------------------------------------------------------------------

GIB = 1 << 30


@pytest.fixture
def cache_bytes(tmp_path, monkeypatch):
    """The KV cache size chosen for a small Llama (1 KiB per token) on a machine with some memory free."""
    import json

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 32,
        "intermediate_size": 32,
        "max_position_embeddings": 1 << 20,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))

    def choose(free_gib: float = 64, context: int = 4096, **cache) -> int:
        monkeypatch.setattr(memory, "available_bytes", lambda: int(free_gib * GIB))
        platforms.set_current_platform(CpuPlatform)
        from hardpoint.config.sections import CacheConfig

        settled = VllmConfig(
            model_config=ModelConfig(model=str(tmp_path), max_model_len=context), cache_config=CacheConfig(**cache)
        )
        assert cpu.bytes_per_token(settled) == 1024
        return settled.cache_config.kv_cache_memory_bytes

    return choose


def test_never_more_than_all_requests_can_fill(cache_bytes):
    assert cache_bytes(context=1024) == 1024 * (1024 + 16) * 128


def test_the_default_stays_below_four_gib_unless_one_request_needs_more(cache_bytes):
    assert cache_bytes(context=1 << 17) == 4 * GIB
    assert cache_bytes(context=1 << 20) == 4 * GIB
    assert cache_bytes(context=1 << 20, block_size=32) == 4 * GIB


def test_a_long_context_lifts_the_cap(cache_bytes, monkeypatch):
    monkeypatch.setattr(cpu, "DEFAULT_CAP_BYTES", GIB // 2)
    assert cache_bytes(context=1 << 20) == 1024 * ((1 << 20) + 16)


def test_the_share_limits_it_on_a_small_machine(cache_bytes):
    assert cache_bytes(free_gib=2, context=1 << 20) == int(2 * GIB * 0.92)


def test_an_explicit_share_is_taken_as_asked(cache_bytes):
    assert cache_bytes(context=1 << 20, gpu_memory_utilization=0.5) == 32 * GIB


def test_exact_sizes_win(cache_bytes, monkeypatch):
    assert cache_bytes(kv_cache_memory_bytes=12345678) == 12345678
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert cache_bytes() == 3 * GIB


def test_memory_seen_from_inside_a_container(tmp_path, monkeypatch):
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(str(2 * GIB))
    used.write_text(str(GIB))
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", ((str(limit), str(used)),))
    assert memory.total_bytes() == 2 * GIB
    assert memory.available_bytes() <= GIB
    limit.write_text("max")
    assert memory.total_bytes() != 2 * GIB
