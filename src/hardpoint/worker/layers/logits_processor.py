"""From hidden states to logits. (What plugins call a logits processor is another thing: see contracts.)"""

from __future__ import annotations

import torch

from hardpoint.contracts.custom_op import PluggableLayer
from hardpoint.worker.distributed.parallel_state import tensor_model_parallel_all_gather
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding


@PluggableLayer.register("logits_processor")
class LogitsProcessor(PluggableLayer):
    """Multiplies with the output head, gathers over the ranks, cuts the padding, caps and scales.

    org_vocab_size   tokens without those added by adapters
    logits_as_input  what it is given are logits already
    soft_cap         logits become soft_cap * tanh(logits / soft_cap)
    """

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = org_vocab_size or vocab_size
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.soft_cap = soft_cap

    def forward(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, org_vocab_size].

        skip_gather  leave each rank its own part of the vocabulary, uncut
        """
        logits = hidden_states if self.logits_as_input else self._project(lm_head, hidden_states, embedding_bias)
        if not self.logits_as_input and not skip_gather:
            if lm_head.tp_size > 1:
                logits = tensor_model_parallel_all_gather(logits)
            logits = logits[..., : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale

    @staticmethod
    def _project(
        lm_head: VocabParallelEmbedding, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None
    ) -> torch.Tensor:
        bias = getattr(lm_head, "bias", None) if embedding_bias is None else embedding_bias
        return lm_head.quant_method.apply(lm_head, hidden_states, bias=bias)

    def extra_repr(self) -> str:
        """Settings, for printing the model."""
        return f"vocab_size={self.vocab_size}, scale={self.scale}, soft_cap={self.soft_cap}"
