"""What most decoders share: grouped-query attention, the gated MLP, the layer and the stack of layers.

An architecture is a subclass of the layer, of the stack and of `causal_lm.DecoderForCausalLM`. What differs is said in
their class attributes and in the few methods that are meant to be overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.current import get_current_vllm_config
from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.attention_backend import AttentionType
from hardpoint.contracts.model import IntermediateTensors
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.distributed.parallel_state import divide, get_pp_group, get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import get_act_and_mul_fn
from hardpoint.worker.layers.attention import Attention
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from hardpoint.worker.layers.rotary_embedding import get_rope
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.loading import (
    AutoWeightsLoader,
    PPMissingLayer,
    WeightsMapper,
    extract_layer_index,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    maybe_remap_kv_scale_name,
)

# A checkpoint's projections and the fused layers they are parts of.
FUSED_PARTS = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj.": (".qkv_proj.", "q"),
        ".k_proj.": (".qkv_proj.", "k"),
        ".v_proj.": (".qkv_proj.", "v"),
        ".gate_proj.": (".gate_up_proj.", 0),
        ".up_proj.": (".gate_up_proj.", 1),
    }
)

NormFactory = Callable[..., nn.Module]


def kv_heads_of(config: Any) -> int:
    """Key/value heads of a layer, over all ranks."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def norm_eps_of(config: Any) -> float:
    """What keeps a norm from dividing by zero."""
    return getattr(config, "rms_norm_eps", 1e-6)


def is_tied(config: Any) -> bool:
    """Whether the output head is the embedding matrix."""
    return bool(getattr(config, "tie_word_embeddings", False))


def positions_of(config: Any) -> int:
    """Positions to be ready for: the model's own, or more where the user allows it."""
    longest = get_current_vllm_config().model_config.max_model_len or 0
    return max(getattr(config, "max_position_embeddings", 8192), longest)


def layer_kind(config: Any, prefix: str) -> str:
    """`full_attention` or `sliding_attention`: the kind of the layer at `prefix`."""
    kinds = getattr(config, "layer_types", None)
    return kinds[extract_layer_index(prefix)] if kinds else "full_attention"


def window_of_layer(config: Any, prefix: str) -> int | None:
    """The window of a layer in a model that has some with and some without; None leaves it to the cache's."""
    return getattr(config, "sliding_window", None) if layer_kind(config, prefix) == "sliding_attention" else None


def rope_of_layer(config: Any, prefix: str) -> dict[str, Any]:
    """The rotary settings of a layer, also of a model that has settings per kind of layer."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    own = parameters.get(layer_kind(config, prefix))
    if isinstance(own, dict):
        parameters = dict(own)
    part = getattr(config, "partial_rotary_factor", None)
    return parameters if part is None else {"partial_rotary_factor": part, **parameters}


class GatedMLP(nn.Module):
    """activation(gate) * up, then down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: QuantizationConfig | None = None,
        reduce_results: bool = True,
        prefix: str = "",
        *,
        bias: bool = False,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [intermediate_size] * 2,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj",
            disable_tp=disable_tp,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            bias=bias,
            quant_config=quant_config,
            reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj",
            disable_tp=disable_tp,
        )
        self.act_fn = get_act_and_mul_fn(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(gate_up))
        return x


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    num_heads, num_kv_heads  heads in all; this rank computes its share
    norm                     makes the norm of each query and key head (`norm(head_dim, eps=...)`); None = no such norm
    scaling                  what scores are multiplied with; one over the root of `head_dim` unless given
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        max_position_embeddings: int | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        bias: bool = False,
        bias_o_proj: bool = False,
        scaling: float | None = None,
        logits_soft_cap: float | None = None,
        norm: NormFactory | None = None,
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.prefix = prefix
        self.hidden_size = hidden_size
        self.total_num_heads = num_heads
        self.total_num_kv_heads = num_kv_heads
        self.num_heads = divide(num_heads, ranks)
        self.num_kv_heads = max(1, num_kv_heads // ranks)
        self.head_dim = head_dim or getattr(config, "head_dim", None) or hidden_size // num_heads
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = self.head_dim**-0.5 if scaling is None else scaling
        self.max_position_embeddings = max_position_embeddings or positions_of(config)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.head_dim,
            num_heads,
            num_kv_heads,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_dim,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self._init_rotary_emb(config, quant_config)
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.scaling,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            logits_soft_cap=logits_soft_cap,
            per_layer_sliding_window=window_of_layer(config, prefix),
            attn_type=attn_type,
            prefix=f"{prefix}.attn",
        )
        self.has_head_norms = norm is not None
        if norm is not None:
            self.q_norm = norm(self.head_dim, eps=norm_eps_of(config))
            self.k_norm = norm(self.head_dim, eps=norm_eps_of(config))

    def _init_rotary_emb(self, config: Any, quant_config: QuantizationConfig | None) -> None:
        self.rotary_emb = get_rope(
            self.head_dim, max_position=self.max_position_embeddings, rope_parameters=rope_of_layer(config, self.prefix)
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens], [tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.has_head_norms:
            q = self.q_norm(q.reshape(-1, self.num_heads, self.head_dim)).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.num_kv_heads, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


def add_and_norm(
    norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's contribution to the residual stream, if there is one yet -> the stream normed, and as it is."""
    if residual is None:
        return norm(hidden_states), hidden_states
    hidden_states, residual = norm(hidden_states, residual)
    return hidden_states, residual


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual stream is handed from layer to layer.

    norm_type         class of the norms
    mlp_name          what checkpoints call the part behind the second norm
    activation_field  where a config names that part's activation
    """

    norm_type: ClassVar[type[nn.Module]] = RMSNorm
    mlp_name: ClassVar[str] = "mlp"
    activation_field: ClassVar[str] = "hidden_act"

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = self._make_attention(config, cache_config, quant_config, f"{prefix}.self_attn")
        self.add_module(self.mlp_name, self._make_mlp(config, quant_config, f"{prefix}.{self.mlp_name}"))
        self.input_layernorm = self._make_norm(config)
        self.post_attention_layernorm = self._make_norm(config)

    def _make_attention(
        self, config: Any, cache_config: CacheConfig | None, quant_config: QuantizationConfig | None, prefix: str
    ) -> nn.Module:
        return DecoderAttention(
            config,
            config.hidden_size,
            config.num_attention_heads,
            kv_heads_of(config),
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=prefix,
            **self._attention_options(config),
        )

    def _attention_options(self, config: Any) -> dict[str, Any]:
        """What this architecture wants of its attention: arguments of `DecoderAttention`."""
        bias = bool(getattr(config, "attention_bias", False))
        return {"bias": bias, "bias_o_proj": bias}

    def _make_mlp(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> nn.Module:
        activation = getattr(config, self.activation_field)
        return GatedMLP(config.hidden_size, config.intermediate_size, activation, quant_config, prefix=prefix)

    def _make_norm(self, config: Any) -> nn.Module:
        return self.norm_type(config.hidden_size, eps=norm_eps_of(config))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens], [tokens, hidden] twice -> this layer's contribution and the residual stream before it."""
        hidden_states, residual = add_and_norm(self.input_layernorm, hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = add_and_norm(self.post_attention_layernorm, hidden_states, residual)
        return getattr(self, self.mlp_name)(hidden_states), residual


def embeddings_for(model: Any, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
    """What the first pipeline stage begins with: embeddings as they are given, or those of the ids."""
    if inputs_embeds is not None:
        return inputs_embeds
    assert input_ids is not None, "the model needs token ids or their embeddings"
    embeds: torch.Tensor = model.embed_input_ids(input_ids)
    return embeds


def received(intermediate_tensors: IntermediateTensors | None) -> IntermediateTensors:
    """What a later pipeline stage begins with."""
    assert intermediate_tensors is not None, "this pipeline stage needs what the one before it computed"
    return intermediate_tensors


@support_torch_compile
class DecoderModel(nn.Module):
    """Embeddings, this stage's layers, the last norm.

    layer_type         class of the layers, unless the constructor is given another
    norm_type          class of the last norm
    scales_embeddings  whether embeddings are multiplied with the root of the hidden size
    hf_to_vllm_mapper  from a checkpoint's parts to the layers that fuse them
    """

    layer_type: ClassVar[type[nn.Module]] = DecoderLayer
    norm_type: ClassVar[type[nn.Module]] = RMSNorm
    scales_embeddings: ClassVar[bool] = False
    hf_to_vllm_mapper: ClassVar[WeightsMapper] = FUSED_PARTS

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", decoder_layer_type: type[nn.Module] | None = None
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.quant_config = vllm_config.quant_config
        self.vocab_size = config.vocab_size
        self.embedding_scale = config.hidden_size**0.5 if self.scales_embeddings else None
        group = get_pp_group()
        self.embed_tokens: nn.Module = PPMissingLayer()
        if group.is_first_rank or (is_tied(config) and group.is_last_rank):
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "embed_tokens"),
            )
        layer_type = decoder_layer_type or self.layer_type
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: self._make_layer(layer_type, vllm_config, prefix),
            prefix=maybe_prefix(prefix, "layers"),
        )
        self.norm: nn.Module = PPMissingLayer()
        if group.is_last_rank:
            self.norm = self.norm_type(config.hidden_size, eps=norm_eps_of(config))
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def _make_layer(self, layer_type: type[nn.Module], vllm_config: VllmConfig, prefix: str) -> nn.Module:
        return layer_type(
            config=self.config,
            cache_config=vllm_config.cache_config,
            quant_config=vllm_config.quant_config,
            prefix=prefix,
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], as the first layer takes them."""
        embeds = self.embed_tokens(input_ids)
        if self.embedding_scale is None:
            return embeds
        # Rounded to the model's number format first, as the model was trained.
        return embeds * torch.tensor(self.embedding_scale, dtype=embeds.dtype)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        residual = None
        if get_pp_group().is_first_rank:
            hidden_states = embeddings_for(self, input_ids, inputs_embeds)
        else:
            before = received(intermediate_tensors)
            hidden_states, residual = before["hidden_states"], before["residual"]
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            assert residual is not None, "a pipeline stage needs at least one layer"
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load this part's weights, fusing what is fused; returns the names of the parameters loaded."""
        parameters = dict(self.named_parameters())
        # Scales of a quantised KV cache, where this model keeps none.
        kept = (
            (target, tensor)
            for name, tensor in weights
            if (target := maybe_remap_kv_scale_name(name, parameters)) is not None
        )
        return AutoWeightsLoader(self).load_weights(kept, mapper=self.hf_to_vllm_mapper)
