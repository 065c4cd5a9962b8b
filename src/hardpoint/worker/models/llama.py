"""Llama and what is built like it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hardpoint.config.sections import CacheConfig, VllmConfig
from hardpoint.contracts.attention_backend import AttentionType
from hardpoint.contracts.model import IntermediateTensors, SupportsLoRA, SupportsPP
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.errors import ModelFileError
from hardpoint.worker.distributed.parallel_state import divide, get_pp_group, get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import SiluAndMul
from hardpoint.worker.layers.attention import Attention
from hardpoint.worker.layers.layernorm import RMSNorm
from hardpoint.worker.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from hardpoint.worker.layers.logits_processor import LogitsProcessor
from hardpoint.worker.layers.rotary_embedding import get_rope
from hardpoint.worker.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from hardpoint.worker.models.compilation import support_torch_compile
from hardpoint.worker.models.decoder import is_tied, window_of_layer
from hardpoint.worker.models.loading import (
    AutoWeightsLoader,
    PPMissingLayer,
    is_pp_missing_parameter,
    load_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    maybe_remap_kv_scale_name,
)


class LlamaMLP(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: QuantizationConfig | None = None,
        bias: bool = False,
        prefix: str = "",
        reduce_results: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if hidden_act not in ("silu", "swish"):
            raise ModelFileError(
                f"the model wants the activation {hidden_act!r}; Llama's is 'silu'", code="model-activation"
            )
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
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(gate_up))
        return x


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions.

    num_heads, num_kv_heads  heads in all; this rank computes its share
    """

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int = 8192,
        quant_config: QuantizationConfig | None = None,
        bias: bool = False,
        bias_o_proj: bool = False,
        cache_config: CacheConfig | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.hidden_size = hidden_size
        self.total_num_heads = num_heads
        self.total_num_kv_heads = num_kv_heads
        self.num_heads = divide(num_heads, ranks)
        self.num_kv_heads = max(1, num_kv_heads // ranks)
        self.head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = self.head_dim**-0.5
        self.max_position_embeddings = max_position_embeddings
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
            per_layer_sliding_window=window_of_layer(config, prefix),
            attn_type=attn_type,
            prefix=f"{prefix}.attn",
        )

    def _init_rotary_emb(self, config: Any, quant_config: QuantizationConfig | None) -> None:
        self.rotary_emb = get_rope(
            self.head_dim,
            max_position=self.max_position_embeddings,
            is_neox_style=True,
            rope_parameters=_rope_parameters(config),
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens], [tokens, hidden] -> [tokens, hidden]."""
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


def _rope_parameters(config: Any) -> dict[str, Any]:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    part = getattr(config, "partial_rotary_factor", None)
    return parameters if part is None else {"partial_rotary_factor": part, **parameters}


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual stream is handed from layer to layer."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__()
        config = config or vllm_config.model_config.hf_config
        quant_config = self.get_quant_config(vllm_config)
        bias = bool(getattr(config, "attention_bias", False) or getattr(config, "bias", False))
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            max_position_embeddings=_positions(vllm_config, config),
            quant_config=quant_config,
            bias=bool(getattr(config, "qkv_bias", bias)),
            bias_o_proj=bias,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.self_attn",
            attn_type=AttentionType.DECODER,
        )
        self.mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            getattr(config, "hidden_act", "silu"),
            quant_config=quant_config,
            bias=bool(getattr(config, "mlp_bias", False)),
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=getattr(config, "rms_norm_eps", 1e-6))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=getattr(config, "rms_norm_eps", 1e-6))

    def get_quant_config(self, vllm_config: VllmConfig) -> QuantizationConfig | None:
        """The quantisation settings of this layer."""
        return vllm_config.quant_config

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens], [tokens, hidden] twice -> this layer's contribution and the residual stream before it."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


def _positions(vllm_config: VllmConfig, config: Any) -> int:
    # A user may allow more than the model was made for.
    return max(getattr(config, "max_position_embeddings", 8192), vllm_config.model_config.max_model_len or 0)


@support_torch_compile
class LlamaModel(nn.Module):
    """Embeddings, the stack of layers, the last norm."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LlamaDecoderLayer
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.quant_config = vllm_config.quant_config
        self.vocab_size = config.vocab_size
        group = get_pp_group()
        needs_embeddings = group.is_first_rank or (is_tied(config) and group.is_last_rank)
        self.embed_tokens: nn.Module = PPMissingLayer()
        if needs_embeddings:
            self.embed_tokens = VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "embed_tokens"),
            )
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: layer_type(vllm_config=vllm_config, prefix=prefix),
            prefix=maybe_prefix(prefix, "layers"),
        )
        last = group.is_last_rank
        self.norm: nn.Module = (
            RMSNorm(config.hidden_size, eps=getattr(config, "rms_norm_eps", 1e-6)) if last else PPMissingLayer()
        )
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        residual = None
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None, "this pipeline stage needs what the one before it computed"
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        elif inputs_embeds is not None:
            hidden_states = inputs_embeds
        else:
            assert input_ids is not None, "the model needs token ids or their embeddings"
            hidden_states = self.embed_input_ids(input_ids)
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if not get_pp_group().is_last_rank:
            assert residual is not None, "a pipeline stage needs at least one layer"
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint's weights, fusing what this model has fused."""
        stacked = (
            (".qkv_proj", ".q_proj", "q"),
            (".qkv_proj", ".k_proj", "k"),
            (".qkv_proj", ".v_proj", "v"),
            (".gate_up_proj", ".gate_proj", 0),
            (".gate_up_proj", ".up_proj", 1),
        )
        parameters = dict(self.named_parameters())
        loaded: set[str] = set()
        for name, tensor in weights:
            if any(part in name for part in AutoWeightsLoader.ROTARY_EMBEDS_UNUSED_WEIGHTS):
                continue
            target: str | None = name
            shard: str | int | None = None
            for fused, part, shard_id in stacked:
                if part in name:
                    target, shard = name.replace(part, fused), shard_id
                    break
            else:
                target = maybe_remap_kv_scale_name(name, parameters)
            if target is None or is_pp_missing_parameter(target, self):
                continue
            if target not in parameters:
                raise ValueError(f"the model has no parameter {target!r}")
            load_parameter(parameters[target], tensor, shard)
            loaded.add(target)
        return loaded


class LlamaForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """Llama with its output head."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = LlamaDecoderLayer
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.quant_config = vllm_config.quant_config
        self.model = self._init_model(vllm_config, maybe_prefix(prefix, "model"), layer_type)
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=self.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            self.lm_head = head.tie_weights(self.model.embed_tokens) if is_tied(config) else head
            self.logits_processor = LogitsProcessor(config.vocab_size, scale=getattr(config, "logit_scale", 1.0))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def _init_model(self, vllm_config: VllmConfig, prefix: str, layer_type: type[nn.Module]) -> Any:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """[tokens] ids (or their embeddings) and [tokens] positions -> [tokens, hidden]."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, hidden] -> [rows, vocabulary]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        tied = ["lm_head."] if is_tied(self.config) else None
        return AutoWeightsLoader(self, skip_prefixes=tied).load_weights(weights)


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral: Llama whose attention may have a window."""
