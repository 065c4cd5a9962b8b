"""A stack of layers with the output head: what makes it a model that generates text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import IntermediateTensors, SupportsLoRA, SupportsPP
from hardpoint.worker.distributed.parallel_state import get_pp_group
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.layers.vocab_parallel_embedding import ParallelLMHead
from hardpoint.worker.models.decoder import DecoderModel, is_tied
from hardpoint.worker.models.loading import AutoWeightsLoader, PPMissingLayer, WeightsMapper, maybe_prefix


class CausalLM(nn.Module, SupportsPP):
    """A stack with its output head.

    stack_type         the stack's class
    stack_name         what checkpoints call the stack, and the attribute that holds it
    embeddings_name    path of the embeddings, which a tied output head shares
    hf_to_vllm_mapper  from a checkpoint's names to this model's; what is fused is the stack's own business
    """

    stack_type: ClassVar[type[nn.Module]]
    stack_name: ClassVar[str] = "model"
    embeddings_name: ClassVar[str] = "model.embed_tokens"
    hf_to_vllm_mapper: ClassVar[WeightsMapper | None] = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **stack_options: Any) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.quant_config = vllm_config.quant_config
        stack = self._init_model(vllm_config, maybe_prefix(prefix, self.stack_name), **stack_options)
        self.add_module(self.stack_name, stack)
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            self.lm_head = self._make_head(config, maybe_prefix(prefix, "lm_head"))
        self.logits_processor = self._make_logits_processor(config)
        self.make_empty_intermediate_tensors = stack.make_empty_intermediate_tensors

    def _init_model(self, vllm_config: VllmConfig, prefix: str, **options: Any) -> Any:
        """Make the stack. options  what the constructor was given beside the configuration"""
        return self.stack_type(vllm_config=vllm_config, prefix=prefix, **options)

    def _make_head(self, config: Any, prefix: str) -> nn.Module:
        head = ParallelLMHead(
            config.vocab_size, self._head_width(config), quant_config=self.quant_config, prefix=prefix
        )
        if not is_tied(config):
            return head
        embeddings: Any = self.get_submodule(self.embeddings_name)
        return head.tie_weights(embeddings)

    def _head_width(self, config: Any) -> int:
        """Numbers per token that the output head takes."""
        return config.hidden_size

    def _make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size)

    @property
    def stack(self) -> Any:
        """The part below the head."""
        return getattr(self, self.stack_name)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], as the first layer takes them."""
        return self.stack.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, what the head takes]."""
        return self.stack(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, what the head takes] -> [rows, vocabulary]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        tied = ["lm_head."] if is_tied(self.config) else None
        return AutoWeightsLoader(self, skip_prefixes=tied).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class DecoderForCausalLM(CausalLM, SupportsLoRA):
    """A `DecoderModel` with its output head."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    stack_type: ClassVar[type[nn.Module]] = DecoderModel
