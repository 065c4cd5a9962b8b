"""Backends by name: vLLM's enum, overrides, new names, and how a layer gets its backend."""

from __future__ import annotations

import pickle

import pytest
import torch

from hardpoint import platforms
from hardpoint.config.current import set_current_vllm_config
from hardpoint.config.sections import AttentionConfig, VllmConfig
from hardpoint.extensions.registry import isolated, registry
from hardpoint.platforms.cpu import CpuPlatform
from hardpoint.worker.attention import selector
from hardpoint.worker.attention.cpu import CPUAttentionBackend
from hardpoint.worker.attention.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend
from hardpoint.worker.attention.selector import get_attn_backend

PATH = "hardpoint.worker.attention.cpu.CPUAttentionBackend"


@pytest.fixture(autouse=True)
def fresh():
    selector._ask.cache_clear()
    with isolated():
        yield
    selector._ask.cache_clear()


class OtherBackend(CPUAttentionBackend):
    class Nested(CPUAttentionBackend):
        pass


OTHER = f"{OtherBackend.__module__}.OtherBackend"


def test_members_look_like_an_enum():
    member = AttentionBackendEnum.CPU_ATTN
    assert member is AttentionBackendEnum["CPU_ATTN"] is AttentionBackendEnum("CPU_ATTN")
    assert (member.name, str(member), member.value) == ("CPU_ATTN", "AttentionBackendEnum.CPU_ATTN", PATH)
    assert member in AttentionBackendEnum
    assert "FLASH_ATTN" in AttentionBackendEnum.__members__
    assert len(list(AttentionBackendEnum)) == len(AttentionBackendEnum)
    with pytest.raises(KeyError):
        AttentionBackendEnum["NOPE"]
    with pytest.raises(AttributeError, match="CPU_ATTN"):
        _ = AttentionBackendEnum.NOPE
    with pytest.raises(ValueError, match="CPU_ATTN"):
        AttentionBackendEnum("NOPE")


def test_paths_and_classes():
    member = AttentionBackendEnum.CPU_ATTN
    assert member.get_path() == PATH
    assert member.get_path(include_classname=False) == "hardpoint.worker.attention.cpu"
    assert member.get_class() is CPUAttentionBackend
    for free in (AttentionBackendEnum.CUSTOM, AttentionBackendEnum.FLASH_ATTN):
        assert free.value == ""
        with pytest.raises(ValueError, match="must be registered before use"):
            free.get_path()
        with pytest.raises(ValueError, match="must be registered before use"):
            free.get_class()


def test_an_override_by_path_replaces_silently_and_can_be_cleared():
    identity = register_backend(AttentionBackendEnum.CPU_ATTN, OTHER)
    assert identity(5) == 5
    assert AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == OTHER
    register_backend(AttentionBackendEnum.CPU_ATTN, OTHER)
    AttentionBackendEnum.CPU_ATTN.clear_override()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is CPUAttentionBackend


def test_a_decorator_fills_a_free_slot_also_with_a_nested_class():
    assert register_backend(AttentionBackendEnum.CUSTOM)(OtherBackend.Nested) is OtherBackend.Nested
    assert AttentionBackendEnum.CUSTOM.get_class() is OtherBackend.Nested
    AttentionBackendEnum.CUSTOM.clear_override()
    assert not AttentionBackendEnum.CUSTOM.is_overridden()


def test_new_names_become_members():
    register_backend("MY_ATTN", OTHER)
    member = AttentionBackendEnum.MY_ATTN
    assert member.get_path() == OTHER
    assert pickle.loads(pickle.dumps(member)) is member
    with pytest.raises(ValueError, match="pass the member"):
        register_backend("MY_ATTN", OTHER)
    with pytest.raises(ValueError, match="pass the member"):
        register_backend("FLASH_ATTN", OTHER)

    @register_backend("LOCAL_ATTN")
    class Local(CPUAttentionBackend):
        pass

    assert AttentionBackendEnum.LOCAL_ATTN.get_class() is Local


@pytest.mark.parametrize("name", ["my attn", "1ST", "name", "_PRIVATE", ""])
def test_names_that_cannot_be_members_are_refused(name):
    with pytest.raises(ValueError, match="cannot be the name"):
        register_backend(name, OTHER)


def test_recurrent_backends_have_a_table_of_their_own():
    register_backend(MambaAttentionBackendEnum.MAMBA1, OTHER)
    try:
        assert MambaAttentionBackendEnum.MAMBA1.get_class() is OtherBackend
        assert "MAMBA1" not in registry("attention_backends")
        register_backend("MY_MAMBA", OTHER, is_mamba=True)
        assert MambaAttentionBackendEnum.MY_MAMBA.get_path(False) == OtherBackend.__module__
    finally:
        for member in (MambaAttentionBackendEnum.MAMBA1, MambaAttentionBackendEnum.MY_MAMBA):
            member.clear_override()
    with pytest.raises(ValueError, match="must be registered before use"):
        MambaAttentionBackendEnum.MAMBA2.get_class()


# Selection


def select(name=None, **facts):
    config = VllmConfig(attention_config=AttentionConfig(backend=name))
    with set_current_vllm_config(config):
        return get_attn_backend(64, torch.float32, "auto", 16, **facts)


def test_the_platform_chooses_unless_the_user_does():
    assert select() is CPUAttentionBackend
    assert select("auto") is CPUAttentionBackend
    register_backend("MY_ATTN", OTHER)
    assert select("my_attn") is OtherBackend
    assert select() is CPUAttentionBackend


def test_an_override_reaches_the_platform_choice():
    register_backend(AttentionBackendEnum.CPU_ATTN, OTHER)
    assert select() is OtherBackend


def test_classes_that_cannot_be_imported_by_path_are_found():
    @register_backend("LOCAL_ATTN")
    class Local(CPUAttentionBackend):
        pass

    assert select("LOCAL_ATTN") is Local


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="NOPE"):
        select("NOPE")
    config = VllmConfig()
    object.__setattr__(config.attention_config, "backend", "NOPE")
    with set_current_vllm_config(config), pytest.raises(ValueError, match="Unknown attention backend 'NOPE'"):
        get_attn_backend(64, torch.float32, "auto", 16)


def test_a_registration_between_two_models_is_seen_by_the_second():
    assert select() is CPUAttentionBackend
    register_backend(AttentionBackendEnum.CPU_ATTN, OTHER)
    assert select().__name__ == "OtherBackend"
    AttentionBackendEnum.CPU_ATTN.clear_override()
    assert select() is CPUAttentionBackend


def test_a_platform_is_asked_once_per_kind_of_layer():
    asked = []

    class Choosy(CpuPlatform):
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
            asked.append((selected_backend, attn_selector_config, num_heads))
            return PATH if attn_selector_config.head_size == 64 else ""

    platforms.set_current_platform(Choosy)
    try:
        for _ in range(3):
            select(num_heads=4, has_sliding_window=True)
        assert len(asked) == 1
        selected, facts, heads = asked[0]
        assert (selected, heads, facts.dtype, facts.block_size) == (None, 4, torch.float32, 16)
        assert facts.has_sliding_window
        with pytest.raises(ValueError, match="Invalid attention backend for cpu"):
            get_attn_backend(80, torch.float32, "auto", 16)
    finally:
        platforms.reset_current_platform()
