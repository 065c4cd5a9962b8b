"""Rotary position embeddings: the plain form and the ways of stretching it to longer contexts.

`get_rope` reads a model's `rope_parameters` and hands the same layer to all that ask for the same.
"""

from __future__ import annotations

import json
import math
from typing import Any
from weakref import WeakValueDictionary

import torch

from hardpoint.config.current import get_current_vllm_config_or_none
from hardpoint.contracts.custom_op import CustomOp, maybe_get_oot_by_class
from hardpoint.errors import ModelFileError
from hardpoint.worker.kernels import ops


@CustomOp.register("rotary_embedding", dynamic_arg_dims={"positions": -1, "query": 0, "key": 0})
class RotaryEmbeddingBase(CustomOp):
    """Turns pairs of elements of each head by an angle that grows with the position.

    rotary_dim       elements of a head that are turned; the rest passes through
    is_neox_style    pairs are (i, i + half) instead of (2i, 2i + 1)
    cos_sin_cache    [positions, rotary_dim]  cosines, then sines
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        init_cache: bool = True,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = base
        self.is_neox_style = is_neox_style
        self.dtype = dtype
        self.cos_sin_cache: torch.Tensor
        if init_cache:
            self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        """[rotary_dim / 2] radians per position."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return 1.0 / (base**exponents)

    def _positions(self) -> torch.Tensor:
        return torch.arange(self.max_position_embeddings, dtype=torch.float32)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        """[positions, rotary_dim]."""
        return self._table(self._compute_inv_freq(self.base))

    def _table(self, inv_freq: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        angles = torch.outer(self._positions(), inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * factor

    def forward_native(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[tokens], [tokens, heads * head_size] twice -> the same two, turned."""
        table = self.cos_sin_cache.index_select(0, positions.flatten())
        if table.dtype != query.dtype:
            table = table.to(query.dtype)
        cos, sin = table.unsqueeze(-2).chunk(2, dim=-1)
        turned_key = None if key is None else self._turn_heads(key, cos, sin)
        return self._turn_heads(query, cos, sin), turned_key

    def _turn_heads(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = x.view(cos.shape[0], -1, self.head_size)
        if self.rotary_dim == self.head_size:
            return self._turn(heads, cos, sin).view(x.shape)
        turned = self._turn(heads[..., : self.rotary_dim], cos, sin)
        return torch.cat((turned, heads[..., self.rotary_dim :]), dim=-1).view(x.shape)

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if self.is_neox_style:
            (one, two), (out_one, out_two) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        else:
            one, two, out_one, out_two = x[..., 0::2], x[..., 1::2], out[..., 0::2], out[..., 1::2]
        if torch.compiler.is_compiling():
            # The compiler fuses these anyway, and cannot follow writes into parts of a tensor.
            out_one.copy_(one * cos - two * sin)
            out_two.copy_(two * cos + one * sin)
            return out
        torch.mul(one, cos, out=out_one).addcmul_(two, sin, value=-1)
        torch.mul(two, cos, out=out_two).addcmul_(one, sin)
        return out

    def forward_cpu(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same in the CPU kernels, where they apply."""
        library = ops.library_for(self, _NATIVE, query)
        settings = self.cos_sin_cache, self.head_size, self.rotary_dim, self.is_neox_style
        done = None if library is None else ops.rotate(library, positions, query, key, *settings)
        return done or self.forward_native(positions, query, key)

    def forward_cuda(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `forward_native`."""
        return self.forward_native(positions, query, key)

    def extra_repr(self) -> str:
        """Settings, for printing the model."""
        return f"head_size={self.head_size}, rotary_dim={self.rotary_dim}, base={self.base}, neox={self.is_neox_style}"


class RotaryEmbedding(RotaryEmbeddingBase):
    """The plain form."""


class StretchedRotaryEmbedding(RotaryEmbedding):
    """Serves a factor more positions than the model was trained with."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
    ) -> None:
        self.scaling_factor = scaling_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _positions(self) -> torch.Tensor:
        return torch.arange(int(self.max_position_embeddings * self.scaling_factor), dtype=torch.float32)


class LinearScalingRotaryEmbedding(StretchedRotaryEmbedding):
    """Positions divided by a factor."""

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return super()._compute_inv_freq(base) / self.scaling_factor


class DynamicNTKScalingRotaryEmbedding(StretchedRotaryEmbedding):
    """A larger base: the one of the longest context, whatever a request's length.

    A base that grew with a request would not fit the keys that are cached already.
    """

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        # At the longest context, factor * length / original length is the factor squared.
        stretch = self.scaling_factor**2 - (self.scaling_factor - 1)
        return super()._compute_inv_freq(base * stretch ** (self.rotary_dim / (self.rotary_dim - 2)))


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Low frequencies divided by a factor, high ones kept, those between blended."""

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        scaling_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        orig_max_position: int,
    ) -> None:
        self.scaling_factor = scaling_factor
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor
        self.orig_max_position = orig_max_position
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        inv_freq = super()._compute_inv_freq(base)
        # How many turns each frequency makes within the original context.
        turns = self.orig_max_position * inv_freq / (2 * math.pi)
        spread = self.high_freq_factor - self.low_freq_factor
        if spread:
            kept = ((turns - self.low_freq_factor) / spread).clamp(0, 1)
        else:
            kept = (turns >= self.high_freq_factor).float()
        return kept * inv_freq + (1 - kept) * inv_freq / self.scaling_factor


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """Low frequencies divided by a factor, high ones kept, and attention made sharper.

    max_position_embeddings  the original context    table_positions  positions to cover, if that is more
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        scaling_factor: float,
        dtype: torch.dtype,
        *,
        extrapolation_factor: float = 1,
        attn_factor: float = 1,
        beta_fast: float = 32,
        beta_slow: float = 1,
        truncate: bool = True,
        attention_factor: float | None = None,
        table_positions: int = 0,
    ) -> None:
        self.table_positions = max(table_positions, int(max_position_embeddings * scaling_factor))
        self.scaling_factor = scaling_factor
        self.extrapolation_factor = extrapolation_factor
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate
        self.mscale = yarn_mscale(scaling_factor) * attn_factor if attention_factor is None else attention_factor
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _dim_of_turns(self, turns: float, base: float) -> float:
        """The pair that makes `turns` turns within the original context."""
        ratio = self.max_position_embeddings / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(ratio) / (2 * math.log(base))

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        inv_freq = super()._compute_inv_freq(base)
        low, high = self._dim_of_turns(self.beta_fast, base), self._dim_of_turns(self.beta_slow, base)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
        kept = (1 - ramp.clamp(0, 1)) * self.extrapolation_factor
        return inv_freq / self.scaling_factor * (1 - kept) + inv_freq * kept

    def _positions(self) -> torch.Tensor:
        return torch.arange(self.table_positions, dtype=torch.float32)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return self._table(self._compute_inv_freq(self.base), self.mscale)


class Phi3LongRoPEScaledRotaryEmbedding(RotaryEmbedding):
    """Every frequency divided by a factor of its own: one list for short contexts, one for long ones.

    The list goes by the longest context that is served, whatever a request's length: with frequencies that
    changed while a request grows, the keys that are cached already would not fit.

    max_position_embeddings  positions the table covers
    short_factor, long_factor  [rotary_dim / 2] each    long_context  use the second list
    short_mscale, long_mscale  what cosines and sines are multiplied with; from the stretch unless given
    """

    def __init__(
        self,
        head_size: int,
        rotary_dim: int,
        max_position_embeddings: int,
        original_max_position_embeddings: int,
        base: float,
        is_neox_style: bool,
        dtype: torch.dtype,
        short_factor: list[float],
        long_factor: list[float],
        short_mscale: float | None = None,
        long_mscale: float | None = None,
        long_context: bool = True,
    ) -> None:
        self.original_max_position_embeddings = original_max_position_embeddings
        self.long_context = long_context
        self.factors = long_factor if long_context else short_factor
        if len(self.factors) != rotary_dim // 2:
            raise ModelFileError(
                f"the model's rope_parameters have {len(self.factors)} factors for {rotary_dim // 2} frequencies",
                code="model-rope",
            )
        given = long_mscale if long_context else short_mscale
        stretch = max_position_embeddings / original_max_position_embeddings
        self.mscale = longrope_mscale(stretch, original_max_position_embeddings) if given is None else given
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype)

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * base**exponents)

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return self._table(self._compute_inv_freq(self.base), self.mscale)


def longrope_mscale(stretch: float, original: int) -> float:
    """How much LongRoPE sharpens attention for a stretch of a context of `original` tokens."""
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))


def yarn_mscale(scale: float = 1, mscale: float = 1) -> float:
    """How much YaRN sharpens attention for a stretch of `scale`."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


# Layers built so far, as long as some model uses them.
_ROPE_DICT: WeakValueDictionary[tuple[Any, ...], RotaryEmbedding] = WeakValueDictionary()


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    dual_chunk_attention_config: dict[str, Any] | None = None,
    mrope_positions_factor: int = 4,
) -> RotaryEmbedding:
    """The rotary layer a model's `rope_parameters` describe; the same object for the same description.

    max_position     positions the table covers (the longest context)
    rope_parameters  rope_type, rope_theta, partial_rotary_factor, and what the type needs
    Raises ModelFileError for a type that is not supported or that lacks a setting.
    """
    settings = dict(rope_parameters or {})
    kind = settings.get("rope_type", "default")
    if dual_chunk_attention_config is not None:
        raise ModelFileError("dual chunk attention is not supported", code="model-rope")
    if kind not in _BUILDERS:
        raise ModelFileError(
            f"the model wants rotary embeddings of type {kind!r}, which is not supported",
            code="model-rope",
            fix=f"known are {', '.join(_BUILDERS)}",
        )
    if kind == "longrope":
        settings.setdefault("long_context", _serves_long(settings))
    cls, build = _BUILDERS[kind]
    dtype = dtype or torch.get_default_dtype()
    chosen = maybe_get_oot_by_class(cls)
    # A layer serves only models that replace and switch ops alike.
    key = (
        chosen,
        chosen.enabled(),
        head_size,
        max_position,
        is_neox_style,
        dtype,
        str(torch.get_default_device()),
        json.dumps(settings, sort_keys=True),
    )
    found = _ROPE_DICT.get(key)
    if found is None:
        rotary_dim = int(head_size * settings.get("partial_rotary_factor", 1.0))
        base = settings.get("rope_theta", 10000.0)
        try:
            found = build(cls, (head_size, rotary_dim), max_position, (base, is_neox_style), dtype, settings)
        except KeyError as missing:
            raise ModelFileError(
                f"the model's rope_parameters of type {kind!r} lack {missing}", code="model-rope"
            ) from None
        _ROPE_DICT[key] = found
    return found


def _plain(cls: Any, sizes: Any, max_position: int, style: Any, dtype: torch.dtype, settings: Any) -> Any:
    return cls(*sizes, max_position, *style, dtype)


def _stretched(cls: Any, sizes: Any, max_position: int, style: Any, dtype: torch.dtype, settings: Any) -> Any:
    return cls(*sizes, max_position, *style, settings["factor"], dtype)


def _llama3(cls: Any, sizes: Any, max_position: int, style: Any, dtype: torch.dtype, settings: Any) -> Any:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return cls(*sizes, max_position, *style, dtype, *(settings[name] for name in names))


def _yarn(cls: Any, sizes: Any, max_position: int, style: Any, dtype: torch.dtype, settings: Any) -> Any:
    original = settings.get("original_max_position_embeddings") or max_position
    factor = settings.get("factor") or max_position / original
    optional = ("extrapolation_factor", "attn_factor", "beta_fast", "beta_slow", "truncate", "attention_factor")
    more = {name: settings[name] for name in optional if settings.get(name) is not None}
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        sharper = yarn_mscale(factor, settings["mscale"]) / yarn_mscale(factor, settings["mscale_all_dim"])
        more.setdefault("attention_factor", sharper)
    return cls(*sizes, original, *style, factor, dtype, table_positions=max_position, **more)


def _serves_long(settings: dict[str, Any]) -> bool:
    """Whether longer contexts are served than the model was first made for."""
    config = get_current_vllm_config_or_none()
    longest = config.model_config.max_model_len if config is not None and config.model_config is not None else None
    return longest is None or longest > settings.get("original_max_position_embeddings", 0)


def _longrope(cls: Any, sizes: Any, max_position: int, style: Any, dtype: torch.dtype, settings: Any) -> Any:
    original = settings["original_max_position_embeddings"]
    mscale = settings.get("attention_factor")
    if mscale is None:
        mscale = longrope_mscale(settings.get("factor") or max_position / original, original)
    return cls(
        *sizes,
        max_position,
        original,
        *style,
        dtype,
        settings["short_factor"],
        settings["long_factor"],
        settings.get("short_mscale") or mscale,
        settings.get("long_mscale") or mscale,
        settings["long_context"],
    )


_BUILDERS: dict[str, tuple[type[RotaryEmbedding], Any]] = {
    "default": (RotaryEmbedding, _plain),
    "linear": (LinearScalingRotaryEmbedding, _stretched),
    "dynamic": (DynamicNTKScalingRotaryEmbedding, _stretched),
    "llama3": (Llama3RotaryEmbedding, _llama3),
    "yarn": (YaRNScalingRotaryEmbedding, _yarn),
    "longrope": (Phi3LongRoPEScaledRotaryEmbedding, _longrope),
}

# As it was written: where a plugin has put another, that computes.
_NATIVE = RotaryEmbeddingBase.forward_native
