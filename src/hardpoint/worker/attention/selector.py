"""Which backend a layer computes with: the user's choice or the platform's, asked once per kind of layer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from hardpoint import platforms
from hardpoint.config.current import get_current_vllm_config_or_none
from hardpoint.contracts.attention_backend import AttentionBackend, AttentionSelectorConfig, AttentionType
from hardpoint.contracts.platform import Platform
from hardpoint.errors import ConfigError
from hardpoint.extensions.registry import registry
from hardpoint.log import init_logger
from hardpoint.worker.attention.registry import AttentionBackendEnum, backend_class

logger = init_logger(__name__)


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int | None = None,
    use_mla: bool = False,
    has_sink: bool = False,
    use_sparse: bool = False,
    use_mm_prefix: bool = False,
    use_per_head_quant_scales: bool = False,
    attn_type: str | None = None,
    num_heads: int | None = None,
    has_sliding_window: bool = False,
) -> type[AttentionBackend]:
    """The backend for a layer with these facts.

    Raises ConfigError when the chosen name has no backend, or the platform has none for the layer.
    """
    config = get_current_vllm_config_or_none()
    facts = AttentionSelectorConfig(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        use_mla=use_mla,
        has_sink=has_sink,
        use_sparse=use_sparse,
        use_mm_prefix=use_mm_prefix,
        use_per_head_quant_scales=use_per_head_quant_scales,
        attn_type=attn_type or AttentionType.DECODER,
        has_sliding_window=has_sliding_window,
        use_kv_connector=config is not None and config.kv_transfer_config is not None,
    )
    chosen = _chosen_member(config.attention_config.backend if config is not None else None)
    # A registration since the last model was built may have changed the answer.
    registered = tuple((entry.name, entry.target) for entry in registry("attention_backends").entries())
    return _ask(platforms.current_platform, chosen, facts, num_heads, registered)


def _chosen_member(name: Any) -> AttentionBackendEnum | None:
    if name is None or isinstance(name, AttentionBackendEnum):
        return name
    if str(name).lower() == "auto":
        return None
    by_upper = {member_name.upper(): member for member_name, member in AttentionBackendEnum.__members__.items()}
    member = by_upper.get(str(name).upper())
    if member is None:
        raise ConfigError(
            f"Unknown attention backend {name!r}",
            code="config-attention-backend",
            fix=f"choose one of {', '.join(by_upper)}",
        )
    return member


@cache
def _ask(
    platform: Platform,
    chosen: AttentionBackendEnum | None,
    facts: AttentionSelectorConfig,
    num_heads: int | None,
    registered: tuple[tuple[str, str], ...],
) -> type[AttentionBackend]:
    path = platform.get_attn_backend_cls(chosen, attn_selector_config=facts, num_heads=num_heads)
    if not path:
        raise ConfigError(
            f"Invalid attention backend for {platform.device_name}: "
            f"the platform has none for {chosen or 'a layer'} with {facts}",
            code="config-attention-backend",
        )
    logger.debug("attention backend %s for %s", path, facts)
    name = next((name for name, target in registered if target.replace(":", ".") == path.replace(":", ".")), None)
    if name is not None:
        registry("attention_backends").note_use(name, "attends")
    return backend_class(path)
