"""A class put in the place of a registered model by a flag, without a plugin that registers it."""

import torch

from hardpoint.worker.models.llama import LlamaForCausalLM


class AcmeLlama(LlamaForCausalLM):
    """Llama that never writes the last token of its vocabulary."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits[:, -1] = float("-inf")
        return logits
