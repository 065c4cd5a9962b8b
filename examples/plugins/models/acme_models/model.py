"""The model. The constructor takes `vllm_config` and `prefix`; everything else it finds there."""

import torch

from hardpoint.worker.models.llama import LlamaForCausalLM


class AcmeForCausalLM(LlamaForCausalLM):
    """Runs any Llama checkpoint, upside down. Override what differs; see contracts.model for what is called."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        logits = super().compute_logits(hidden_states)
        return None if logits is None else -logits
