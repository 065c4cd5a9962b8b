"""GPT-2: learned positions, layer norms with biases, projections stored the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.model import IntermediateTensors
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.distributed.parallel_state import divide, get_pp_group, get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import get_act_fn
from hardpoint.worker.layers.attention import Attention
from hardpoint.worker.layers.layernorm import LayerNorm
from hardpoint.worker.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding
from hardpoint.worker.models.causal_lm import CausalLM
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import embeddings_for, is_tied, received
from hardpoint.worker.models.loading import (
    PPMissingLayer,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
)

# Masks that old checkpoints carry along.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias")
# Layers whose weights are stored as [input, output].
_TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


class GPT2Attention(nn.Module):
    """Multi-head attention without rotary positions."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        total = config.num_attention_heads
        self.num_heads = divide(total, get_tensor_model_parallel_world_size())
        self.head_dim = self.hidden_size // total
        self.scale = self.head_dim**-0.5 if getattr(config, "scale_attn_weights", True) else 1.0
        if getattr(config, "scale_attn_by_inverse_layer_idx", False):
            self.scale /= extract_layer_index(prefix) + 1
        self.c_attn = QKVParallelLinear(
            self.hidden_size, self.head_dim, total, bias=True, quant_config=quant_config, prefix=f"{prefix}.c_attn"
        )
        self.c_proj = RowParallelLinear(
            self.hidden_size, self.hidden_size, bias=True, quant_config=quant_config, prefix=f"{prefix}.c_proj"
        )
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            scale=self.scale,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.c_attn(hidden_states)
        q, k, v = qkv.chunk(chunks=3, dim=-1)
        output, _ = self.c_proj(self.attn(q, k, v))
        return output


class GPT2MLP(nn.Module):
    """Up, activation, down."""

    def __init__(
        self, intermediate_size: int, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.c_fc = ColumnParallelLinear(
            hidden, intermediate_size, bias=True, quant_config=quant_config, prefix=f"{prefix}.c_fc"
        )
        self.c_proj = RowParallelLinear(
            intermediate_size, hidden, bias=True, quant_config=quant_config, prefix=f"{prefix}.c_proj"
        )
        self.act = get_act_fn(config.activation_function)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        hidden_states, _ = self.c_fc(hidden_states)
        hidden_states, _ = self.c_proj(self.act(hidden_states))
        return hidden_states


class GPT2Block(nn.Module):
    """One layer."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_epsilon
        self.ln_1 = LayerNorm(hidden, eps)
        self.attn = GPT2Attention(config, cache_config, quant_config, prefix=f"{prefix}.attn")
        self.ln_2 = LayerNorm(hidden, eps)
        self.mlp = GPT2MLP(config.intermediate_size, config, quant_config, prefix=f"{prefix}.mlp")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states))
        return hidden_states + self.mlp(self.ln_2(hidden_states))


@support_torch_compile
class GPT2Model(nn.Module):
    """Embeddings of tokens and positions, this stage's layers, the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        group = get_pp_group()
        self.wte: nn.Module = PPMissingLayer()
        self.wpe: nn.Module = PPMissingLayer()
        if group.is_first_rank or (is_tied(config) and group.is_last_rank):
            self.wte = VocabParallelEmbedding(
                config.vocab_size, config.hidden_size, quant_config=vllm_config.quant_config, prefix=f"{prefix}.wte"
            )
        if group.is_first_rank:
            self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.start_layer, self.end_layer, self.h = make_layers(
            config.num_hidden_layers,
            lambda prefix: GPT2Block(config, vllm_config.cache_config, vllm_config.quant_config, prefix=prefix),
            prefix=f"{prefix}.h",
        )
        last = group.is_last_rank
        self.ln_f: nn.Module = LayerNorm(config.hidden_size, config.layer_norm_epsilon) if last else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.wte(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        if get_pp_group().is_first_rank:
            hidden_states = embeddings_for(self, input_ids, inputs_embeds) + self.wpe(positions)
        else:
            hidden_states = received(intermediate_tensors)["hidden_states"]
        for layer in self.h[self.start_layer : self.end_layer]:
            hidden_states = layer(hidden_states)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states})
        return self.ln_f(hidden_states)


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its output head."""

    stack_type = GPT2Model
    stack_name = "transformer"
    embeddings_name = "transformer.wte"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        # A GGUF file has them the usual way round.
        gguf = self.quant_config is not None and self.quant_config.get_name() == "gguf"
        return super().load_weights(_as_linear(weights, turned=not gguf))


def _as_linear(weights: Iterable[tuple[str, torch.Tensor]], turned: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the full names, [output, input]."""
    for name, tensor in weights:
        if name.endswith(_NOT_WEIGHTS):
            continue
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        yield full, tensor.t() if turned and name.endswith(_TURNED) else tensor
