"""CLIP's vision tower: an image in patches through a stack of layers that look both ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hardpoint.errors import ModelFileError
from hardpoint.worker.distributed.parallel_state import get_tensor_model_parallel_world_size
from hardpoint.worker.layers.activation import get_act_fn
from hardpoint.worker.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from hardpoint.worker.models.loading import AutoWeightsLoader, WeightsMapper

_FUSED = WeightsMapper(
    orig_to_new_stacked={
        ".q_proj.": (".qkv_proj.", "q"),
        ".k_proj.": (".qkv_proj.", "k"),
        ".v_proj.": (".qkv_proj.", "v"),
    }
)


def hidden_state_number(layer: int, num_layers: int) -> int:
    """Which hidden state a config means: 0 is what the first layer gets, n what the n-th returns.

    ModelFileError for a layer that the tower does not have.
    """
    number = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= number <= num_layers:
        raise ModelFileError(
            f"vision_feature_layer is {layer}, and the vision tower has {num_layers} layers", code="model-facts"
        )
    return number


class CLIPVisionEmbeddings(nn.Module):
    """Patches, a class token before them, and their positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.image_size, self.patch_size = config.image_size, config.patch_size
        self.class_embedding = nn.Parameter(torch.empty(config.hidden_size))
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=self.patch_size, stride=self.patch_size, bias=False
        )
        self.num_positions = (self.image_size // self.patch_size) ** 2 + 1
        self.position_embedding = nn.Embedding(self.num_positions, config.hidden_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[images, channels, height, width] -> [images, tokens, hidden]; ValueError for images of another size."""
        if pixel_values.dim() != 4 or pixel_values.shape[-2:] != (self.image_size, self.image_size):
            raise ValueError(
                f"pixel values of shape {tuple(pixel_values.shape)}: the vision tower takes images of "
                f"{self.image_size} x {self.image_size}"
            )
        patches = self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype))
        patches = patches.flatten(2).transpose(1, 2)
        whole = torch.cat([self.class_embedding.expand(len(patches), 1, -1), patches], dim=1)
        return whole + self.position_embedding.weight


class CLIPEncoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual stream."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        ranks = get_tensor_model_parallel_world_size()
        # A tower whose heads or channels do not split evenly is computed whole by every rank.
        whole = bool(heads % ranks or config.intermediate_size % ranks)
        self.self_attn = CLIPAttention(hidden, heads, whole, f"{prefix}.self_attn")
        self.layer_norm1 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.mlp = CLIPMLP(hidden, config.intermediate_size, config.hidden_act, whole, f"{prefix}.mlp")
        self.layer_norm2 = nn.LayerNorm(hidden, eps=config.layer_norm_eps)

    def forward(self, x: torch.Tensor, images: int) -> torch.Tensor:
        """[images * tokens, hidden] twice."""
        x = x + self.self_attn(self.layer_norm1(x), images)
        return x + self.mlp(self.layer_norm2(x))


class CLIPAttention(nn.Module):
    """Every token of an image sees all of it."""

    def __init__(self, hidden: int, heads: int, whole: bool, prefix: str) -> None:
        super().__init__()
        if hidden % heads:
            raise ModelFileError(f"{heads} heads do not divide {hidden} channels", code="model-facts")
        self.head_dim = hidden // heads
        self.qkv_proj = QKVParallelLinear(
            hidden, self.head_dim, heads, bias=True, prefix=f"{prefix}.qkv_proj", disable_tp=whole
        )
        self.out_proj = RowParallelLinear(hidden, hidden, bias=True, prefix=f"{prefix}.out_proj", disable_tp=whole)
        self.num_heads = self.qkv_proj.num_heads

    def forward(self, x: torch.Tensor, images: int) -> torch.Tensor:
        """[images * tokens, hidden] twice."""
        qkv, _ = self.qkv_proj(x)
        split = qkv.view(images, -1, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(split[0], split[1], split[2])
        out, _ = self.out_proj(found.transpose(1, 2).reshape(x.shape[0], -1))
        return out


class CLIPMLP(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, hidden: int, intermediate: int, act: str, whole: bool, prefix: str) -> None:
        super().__init__()
        self.fc1 = ColumnParallelLinear(hidden, intermediate, bias=True, prefix=f"{prefix}.fc1", disable_tp=whole)
        self.activation_fn = get_act_fn(act)
        self.fc2 = RowParallelLinear(intermediate, hidden, bias=True, prefix=f"{prefix}.fc2", disable_tp=whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] twice."""
        x, _ = self.fc1(x)
        x, _ = self.fc2(self.activation_fn(x))
        return x


class CLIPEncoder(nn.Module):
    """The layers up to the last one that is needed."""

    def __init__(self, config: Any, count: int, prefix: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CLIPEncoderLayer(config, f"{prefix}.layers.{index}") for index in range(count))


class CLIPVisionModel(nn.Module):
    """The tower, as far as the hidden states that are taken from it.

    wanted  numbers of these hidden states: see `hidden_state_number`
    """

    def __init__(self, config: Any, wanted: Sequence[int], prefix: str = "") -> None:
        super().__init__()
        self.wanted = list(wanted)
        self.embeddings = CLIPVisionEmbeddings(config)
        # Spelt as in the checkpoints.
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = CLIPEncoder(config, max(self.wanted), f"{prefix}.encoder")

    def forward(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """[images, channels, height, width] -> the wanted hidden states, each [images, tokens, hidden]."""
        x = self.pre_layrnorm(self.embeddings(pixel_values))
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        states = [x]
        for layer in self.encoder.layers:
            x = layer(x, shape[0])
            states.append(x)
        return [states[number].view(shape) for number in self.wanted]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's tower, passing over the layers that are not needed."""
        needed = [f"encoder.layers.{index}." for index in range(len(self.encoder.layers))]
        kept = (
            (name, tensor)
            for name, tensor in weights
            if not name.startswith("encoder.layers.") or name.startswith(tuple(needed))
        )
        loader = AutoWeightsLoader(self, skip_prefixes=["post_layernorm.", "embeddings.position_ids", "head."])
        return loader.load_weights(kept, mapper=_FUSED)
