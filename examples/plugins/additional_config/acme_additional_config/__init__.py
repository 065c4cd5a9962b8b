"""Reads `vllm_config.additional_config`, vLLM's open bag of options; see plugin_config for typed settings."""

from typing import Any

import torch

from hardpoint.contracts.logits_processor import BatchUpdate, LogitsProcessorV1


class AcmeBan(LogitsProcessorV1):
    """`--additional-config '{"acme": {"ban": [5, 7]}}'`: these tokens are never written, whatever a request says."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        own = (vllm_config.additional_config or {}).get("acme", {})
        self.banned = torch.tensor(own.get("ban", []), dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        """A banned token may have been the best."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """All requests are treated alike."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary]."""
        return logits.index_fill_(1, self.banned, float("-inf"))
