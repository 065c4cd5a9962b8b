"""OPT: learned positions, layer norms with biases, a plain MLP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.model import IntermediateTensors, SupportsLoRA
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.distributed.parallel_state import divide, get_pp_group, get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import get_act_fn
from hardpoint.worker.layers.attention import Attention
from hardpoint.worker.layers.layernorm import LayerNorm
from hardpoint.worker.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding
from hardpoint.worker.models.causal_lm import CausalLM
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import embeddings_for, is_tied, received
from hardpoint.worker.models.loading import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)

_EPS = 1e-5


class OPTLearnedPositionalEmbedding(nn.Embedding):
    """Position -> vector; the table's first two rows belong to no position."""

    OFFSET = 2

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings + self.OFFSET, embedding_dim)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return super().forward(positions + self.OFFSET)


class OPTAttention(nn.Module):
    """Multi-head attention without rotary positions.

    num_heads  heads in all; this rank computes its share
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = divide(num_heads, get_tensor_model_parallel_world_size())
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            embed_dim, self.head_dim, num_heads, bias=bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, bias=bias, quant_config=quant_config, prefix=f"{prefix}.out_proj"
        )
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            scale=self.scaling,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.chunk(chunks=3, dim=-1)
        output, _ = self.out_proj(self.attn(q, k, v))
        return output


class OPTDecoderLayer(nn.Module):
    """One layer; the norms stand before each half, or after it in the smallest models."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        bias = config.enable_bias
        self.embed_dim = config.hidden_size
        self.do_layer_norm_before = config.do_layer_norm_before
        self.self_attn = OPTAttention(
            self.embed_dim, config.num_attention_heads, bias, cache_config, quant_config, f"{prefix}.self_attn"
        )
        self.self_attn_layer_norm = LayerNorm(self.embed_dim, _EPS)
        self.fc1 = ColumnParallelLinear(
            self.embed_dim, config.ffn_dim, bias=bias, quant_config=quant_config, prefix=f"{prefix}.fc1"
        )
        self.activation_fn = get_act_fn(config.activation_function)
        self.fc2 = RowParallelLinear(
            config.ffn_dim, self.embed_dim, bias=bias, quant_config=quant_config, prefix=f"{prefix}.fc2"
        )
        self.final_layer_norm = LayerNorm(self.embed_dim, _EPS)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        hidden_states = self._half(hidden_states, self.self_attn_layer_norm, self.self_attn)
        return self._half(hidden_states, self.final_layer_norm, self._mlp)

    def _half(self, hidden_states: torch.Tensor, norm: nn.Module, compute: Any) -> torch.Tensor:
        if self.do_layer_norm_before:
            return hidden_states + compute(norm(hidden_states))
        return norm(hidden_states + compute(hidden_states))

    def _mlp(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states, _ = self.fc1(hidden_states)
        hidden_states, _ = self.fc2(self.activation_fn(hidden_states))
        return hidden_states


class OPTDecoder(nn.Module):
    """Embeddings of tokens and positions, this stage's layers, the last norm."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        decoder_layer_type: type[nn.Module] = OPTDecoderLayer,
    ) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        width, hidden = config.word_embed_proj_dim, config.hidden_size
        group = get_pp_group()
        self.embed_tokens: nn.Module = PPMissingLayer()
        self.embed_positions: nn.Module = PPMissingLayer()
        if group.is_first_rank or (is_tied(config) and group.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size, width, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
            )
        if group.is_first_rank:
            self.embed_positions = OPTLearnedPositionalEmbedding(config.max_position_embeddings, hidden)
        self.project_in = self._projection(width, hidden, group.is_first_rank, quant_config, f"{prefix}.project_in")
        self.project_out = self._projection(hidden, width, group.is_last_rank, quant_config, f"{prefix}.project_out")
        has_norm = config.do_layer_norm_before and not getattr(config, "_remove_final_layer_norm", False)
        self.final_layer_norm: nn.Module | None = None
        if has_norm:
            self.final_layer_norm = LayerNorm(hidden, _EPS) if group.is_last_rank else PPMissingLayer()
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: decoder_layer_type(config, cache_config, quant_config, prefix=prefix),
            prefix=f"{prefix}.layers",
        )

    @staticmethod
    def _projection(
        inputs: int, outputs: int, here: bool, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module | None:
        if inputs == outputs:
            return None
        if not here:
            return PPMissingLayer()
        return ReplicatedLinear(inputs, outputs, bias=False, quant_config=quant_config, prefix=prefix)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, width of the embeddings]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, width of the embeddings]."""
        if get_pp_group().is_first_rank:
            embeds = embeddings_for(self, input_ids, inputs_embeds)
            if self.project_in is not None:
                embeds, _ = self.project_in(embeds)
            hidden_states = embeds + self.embed_positions(positions)
        else:
            hidden_states = received(intermediate_tensors)["hidden_states"]
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states = layer(hidden_states)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        if self.final_layer_norm is not None:
            hidden_states = self.final_layer_norm(hidden_states)
        if self.project_out is not None:
            hidden_states, _ = self.project_out(hidden_states)
        return hidden_states


@support_torch_compile
class OPTModel(nn.Module):
    """The decoder under the name a checkpoint has for it."""

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj.": (".qkv_proj.", "q"),
            ".k_proj.": (".qkv_proj.", "k"),
            ".v_proj.": (".qkv_proj.", "v"),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.decoder = OPTDecoder(
            config, vllm_config.cache_config, vllm_config.quant_config, maybe_prefix(prefix, "decoder")
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, width of the embeddings]."""
        return self.decoder.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As the decoder."""
        return self.decoder(input_ids, positions, intermediate_tensors, inputs_embeds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load this part's weights; returns the names of the parameters loaded."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


class OPTForCausalLM(CausalLM, SupportsLoRA):
    """OPT with its output head."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    embedding_modules: ClassVar[dict[str, str]] = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    stack_type = OPTModel
    embeddings_name = "model.decoder.embed_tokens"
    # The first checkpoints lack the outer name.
    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"decoder.": "model.decoder."})

    def _head_width(self, config: Any) -> int:
        return config.word_embed_proj_dim
