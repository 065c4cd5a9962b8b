"""BERT and RoBERTa: encoders that embed texts, classify them, and score pairs of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from hardpoint.config.sections import VllmConfig
from hardpoint.contracts.model import SupportsCrossEncoding, SupportsQuant, attn_type, default_pooling_type
from hardpoint.contracts.quantization import QuantizationConfig
from hardpoint.worker.distributed.parallel_state import divide, get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import get_act_fn
from hardpoint.worker.layers.encoder_attention import EncoderOnlyAttention
from hardpoint.worker.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from hardpoint.worker.layers.vocab_parallel_embedding import VocabParallelEmbedding
from hardpoint.worker.models.loading import AutoWeightsLoader, WeightsMapper, maybe_prefix
from hardpoint.worker.pooling.dense import sentence_projector
from hardpoint.worker.pooling.labels import num_labels_of
from hardpoint.worker.pooling.methods import CLSPool, SequencePoolingMethod
from hardpoint.worker.pooling.poolers import DispatchPooler

_PARTS = WeightsMapper(
    orig_to_new_stacked={
        ".self.query.": (".self.qkv_proj.", "q"),
        ".self.key.": (".self.qkv_proj.", "k"),
        ".self.value.": (".self.qkv_proj.", "v"),
    },
    orig_to_new_substr={".gamma": ".weight", ".beta": ".bias"},
)


class BertEmbedding(nn.Module):
    """Words, positions and segments, added and normed."""

    # What the first position is called; RoBERTa leaves the first ones out.
    first_position = 0

    def __init__(self, config: Any) -> None:
        super().__init__()
        if getattr(config, "position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"position_embedding_type {config.position_embedding_type!r} is not supported")
        self.word_embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        """[tokens] three times -> [tokens, hidden]; no segment ids stand for the first segment."""
        if inputs_embeds is None:
            assert input_ids is not None, "the model needs token ids or their embeddings"
            inputs_embeds = self.word_embeddings(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(positions)
        segments = self.token_type_embeddings(token_type_ids)
        places = self.position_embeddings(positions + self.first_position)
        return self.LayerNorm(inputs_embeds + segments + places)


class RobertaEmbedding(BertEmbedding):
    """The same; positions are counted from behind the padding's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.first_position = getattr(config, "pad_token_id", 1) + 1


class BertSelfAttention(nn.Module):
    """Queries, keys and values, and attention in both directions."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        heads = config.num_attention_heads
        head_size = divide(config.hidden_size, heads)
        local = divide(heads, get_tensor_model_parallel_world_size())
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, head_size, heads, heads, bias=True, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj", return_bias=False,
        )  # fmt: skip
        self.attn = EncoderOnlyAttention(local, head_size, head_size**-0.5, prefix=f"{prefix}.attn")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden of this rank]."""
        return self.attn(*self.qkv_proj(hidden_states).chunk(3, dim=-1))


class BertOutput(nn.Module):
    """A projection added to what went around it, normed."""

    def __init__(self, config: Any, input_size: int, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.dense = RowParallelLinear(
            input_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.dense", return_bias=False
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, input of this rank], [tokens, hidden] -> [tokens, hidden]."""
        return self.LayerNorm(self.dense(hidden_states) + residual)


class BertAttention(nn.Module):
    """Attention with its output."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.self = BertSelfAttention(config, quant_config, f"{prefix}.self")
        self.output = BertOutput(config, config.hidden_size, quant_config, f"{prefix}.output")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self.output(self.self(hidden_states), hidden_states)


class BertIntermediate(nn.Module):
    """The first half of the MLP."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.dense = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, quant_config=quant_config, prefix=f"{prefix}.dense",
            return_bias=False,
        )  # fmt: skip
        self.intermediate_act_fn = get_act_fn(config.hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, intermediate of this rank]."""
        return self.intermediate_act_fn(self.dense(hidden_states))


class BertLayer(nn.Module):
    """Attention and MLP, each followed by its norm."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.attention = BertAttention(config, quant_config, f"{prefix}.attention")
        self.intermediate = BertIntermediate(config, quant_config, f"{prefix}.intermediate")
        self.output = BertOutput(config, config.intermediate_size, quant_config, f"{prefix}.output")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        hidden_states = self.attention(hidden_states)
        return self.output(self.intermediate(hidden_states), hidden_states)


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None, prefix: str) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(config, quant_config, f"{prefix}.layer.{number}") for number in range(config.num_hidden_layers)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return hidden_states


class BertPooler(SequencePoolingMethod):
    """The first token's state through a layer that was trained with the classifier."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.pooling = CLSPool()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: Any) -> torch.Tensor:
        """[rows, hidden] -> [requests, hidden]."""
        return torch.tanh(self.dense(self.pooling(hidden_states, pooling_metadata)))


class BertModel(nn.Module):
    """Embeddings and layers; `with_pooler` also the layer behind the first token."""

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        prefix: str = "",
        embedding_class: type[BertEmbedding] = BertEmbedding,
        with_pooler: bool = False,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embeddings = embedding_class(config)
        self.encoder = BertEncoder(config, vllm_config.quant_config, maybe_prefix(prefix, "encoder"))
        self.pooler = BertPooler(config) if with_pooler else None

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], words only."""
        return self.embeddings.word_embeddings(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens] ids, positions and segments -> [tokens, hidden]."""
        return self.encoder(self.embeddings(input_ids, positions, token_type_ids, inputs_embeds))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the weights below this part's name; a layer behind the first token that is not used is left out."""
        skipped = ["embeddings.position_ids", *([] if self.pooler is not None else ["pooler."])]
        return AutoWeightsLoader(self, skip_prefixes=skipped).load_weights(weights, mapper=_PARTS)


class _Encoder(nn.Module):
    """What the models for each use share: the encoder, under the name its checkpoints have, and how it is run."""

    is_pooling_model = True
    embedding_class: ClassVar[type[BertEmbedding]] = BertEmbedding
    # The encoder's name in a checkpoint with a head.
    inner: ClassVar[str] = "bert"

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden], words only."""
        return getattr(self, self.inner).embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens] ids, positions and segments -> [tokens, hidden]."""
        return getattr(self, self.inner)(input_ids, positions, intermediate_tensors, inputs_embeds, token_type_ids)


@attn_type("encoder_only")
@default_pooling_type(seq_pooling_type="CLS")
class BertEmbeddingModel(_Encoder, SupportsQuant):
    """BERT as an embedder."""

    inner = "model"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        pooler_config = vllm_config.model_config.pooler_config
        assert pooler_config is not None, "pooling models have pooling settings"
        self.model = BertModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), embedding_class=self.embedding_class
        )
        self.projector = sentence_projector(vllm_config.model_config)
        self.pooler = DispatchPooler.for_embedding(pooler_config, self.projector)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint with or without a name before the encoder's; heads for pre-training are left out."""
        named = ((self._inside(name), tensor) for name, tensor in weights)
        kept = ((name, tensor) for name, tensor in named if not name.startswith(("cls.", "lm_head.")))
        loaded = {f"model.{name}" for name in self.model.load_weights(kept)}
        return loaded | {name for name, _ in self.named_parameters() if name.startswith("projector.")}

    @staticmethod
    def _inside(name: str) -> str:
        for before in ("bert.", "roberta.", "model."):
            name = name.removeprefix(before)
        return name


class RobertaEmbeddingModel(BertEmbeddingModel):
    """RoBERTa as an embedder."""

    embedding_class = RobertaEmbedding


@attn_type("encoder_only")
@default_pooling_type(seq_pooling_type="CLS")
class BertForSequenceClassification(_Encoder, SupportsCrossEncoding, SupportsQuant):
    """BERT that classifies a text, or scores two that are read together."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        pooler_config = vllm_config.model_config.pooler_config
        assert pooler_config is not None, "pooling models have pooling settings"
        self.bert = BertModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "bert"), with_pooler=True)
        self.classifier = nn.Linear(config.hidden_size, num_labels_of(config))
        self.pooler = DispatchPooler.for_seq_cls(pooler_config, pooling=self.bert.pooler, classifier=self.classifier)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        return AutoWeightsLoader(self).load_weights(weights)


class RobertaClassificationHead(nn.Module):
    """Two layers over the first token's state, or over any token's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, num_labels_of(config))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., labels]."""
        return self.out_proj(torch.tanh(self.dense(states)))


@attn_type("encoder_only")
@default_pooling_type(seq_pooling_type="CLS")
class RobertaForSequenceClassification(_Encoder, SupportsCrossEncoding, SupportsQuant):
    """RoBERTa that classifies a text, or scores two that are read together."""

    inner = "roberta"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        pooler_config = vllm_config.model_config.pooler_config
        assert pooler_config is not None, "pooling models have pooling settings"
        self.roberta = BertModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "roberta"), embedding_class=RobertaEmbedding
        )
        self.classifier = RobertaClassificationHead(config)
        self.pooler = DispatchPooler.for_seq_cls(pooler_config, pooling=CLSPool(), classifier=self.classifier)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's weights; returns the names of the parameters loaded."""
        return AutoWeightsLoader(self).load_weights(weights)
