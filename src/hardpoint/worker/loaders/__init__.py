"""Model loaders, and the way from a configuration to a loaded model."""

from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.worker.loaders.building import get_model, process_weights_after_loading
from hardpoint.worker.loaders.registry import get_model_loader, register_model_loader

__all__ = [
    "BaseModelLoader",
    "get_model",
    "get_model_loader",
    "process_weights_after_loading",
    "register_model_loader",
]
