"""Adapters on a model that is called directly, without an engine around it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from paged_model import PagedModel

from hardpoint.config.sections import LoRAConfig
from hardpoint.types.lora_request import LoRARequest
from hardpoint.worker.lora.manager import AdapterManager
from lora_adapters import KINDS

TOKENS = list(range(5, 45))


def manager_of(model: PagedModel, folder: Path, names=tuple(KINDS), **limits) -> AdapterManager:
    """Adapters of a model that is called directly, numbered from 1."""
    vars(model.config)["lora_config"] = LoRAConfig(**limits)
    manager = AdapterManager(model.model, model.config, torch.device("cpu"))
    for number, name in enumerate(names, 1):
        assert manager.add(LoRARequest(name, number, str(folder / name)))
    return manager


def logits(model: PagedModel, manager: AdapterManager, adapters: list[int]) -> list[torch.Tensor]:
    """Logits of TOKENS once for each adapter, all in one batch."""
    manager._of_tokens = np.repeat(adapters, len(TOKENS))
    with manager.rows():
        return model.logits([(0, TOKENS, [1 + 3 * i, 2 + 3 * i, 3 + 3 * i]) for i in range(len(adapters))])
