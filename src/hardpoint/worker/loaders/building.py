"""From a configuration to a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hardpoint import platforms
from hardpoint.config.draft import writing
from hardpoint.config.sections import LoadConfig, ModelConfig, VllmConfig
from hardpoint.contracts.attention_backend import AttentionLayerBase
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.contracts.quantization import QuantizeMethodBase
from hardpoint.extensions.faults import in_words
from hardpoint.extensions.ledger import ledger
from hardpoint.log import init_logger
from hardpoint.worker.loaders.registry import get_model_loader
from hardpoint.worker.models.building import initialize_model
from hardpoint.worker.models.compiling import compile_model
from hardpoint.worker.quantization.resolve import get_quant_config

logger = init_logger(__name__)


def get_model(
    *,
    vllm_config: VllmConfig,
    model_config: ModelConfig | None = None,
    prefix: str = "",
    load_config: LoadConfig | None = None,
) -> nn.Module:
    """Build and load the model of a configuration.

    model_config, load_config  in place of the configuration's own
    Raises ModelFileError naming file and tensor for a checkpoint that does not fit; ConfigError for a
    choice that is not supported.
    """
    loader = get_model_loader(load_config or vllm_config.load_config)
    model = loader.load_model(
        vllm_config=vllm_config, model_config=model_config or vllm_config.model_config, prefix=prefix
    )
    compile_model(model, vllm_config)
    return model


def load_with(loader: BaseModelLoader, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> nn.Module:
    """Build a model on its device, let `loader` fill it, and let its layers prepare."""
    dtype = torch_dtype(model_config.dtype)
    with set_default_torch_dtype(dtype), torch.no_grad():
        with torch.device(_device(loader.load_config)):
            model = loader.create_model(vllm_config, model_config, prefix)
        logger.debug("Loading weights ...")
        loader.load_weights(model, model_config)
        process_weights_after_loading(model, model_config)
    return model.eval()


def create_model(vllm_config: VllmConfig, model_config: ModelConfig, prefix: str) -> nn.Module:
    """Build a model with uninitialised parameters."""
    if vllm_config.quant_config is None:
        found = get_quant_config(model_config, vllm_config.load_config)
        with writing(vllm_config, "build the quantisation"):
            vllm_config.quant_config = found
    return initialize_model(vllm_config, prefix=prefix, model_config=model_config)


def build_without_weights(vllm_config: VllmConfig) -> None:
    """Build a model without weights and without memory for them, for what is said while it is built.

    A model that wants to see its tensors' values cannot be built so; that is noted and is no error.
    """
    config = vllm_config.model_config
    config.dtype = torch_dtype(config.dtype)
    with set_default_torch_dtype(config.dtype), torch.no_grad(), torch.device("meta"):
        try:
            create_model(vllm_config, config, "")
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            detail = f"{config.architecture} was not built: without memory its constructor raises {in_words(error)}"
            ledger.record("skip", "models", config.architecture, detail=detail)


def process_weights_after_loading(model: nn.Module, model_config: ModelConfig, target_device: Any = None) -> None:
    """Let the quantisation methods, then the attention layers, bring their weights into shape."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)
    for module in model.modules():
        prepare: Any = getattr(module, "process_weights_after_loading", None)
        if isinstance(module, AttentionLayerBase) and prepare is not None:
            prepare(torch_dtype(model_config.dtype))


def _device(load_config: LoadConfig) -> torch.device:
    return torch.device(load_config.device or platforms.current_platform.device_type)


def torch_dtype(dtype: Any) -> torch.dtype:
    """A torch type from itself or from its name."""
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the type of new float tensors inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
