"""What llama.cpp calls the tensors of a model, and how it stores them otherwise than Hugging Face's models have them.

One row per architecture. Names on the left are GGUF's, those on the right are what a model's `load_weights` expects;
`{}` stands for an expert's number, and several names for the parts of a tensor that holds them one below the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Parts = tuple[str, ...]

_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class TensorNames:
    """An architecture's names.

    outer, block  GGUF name -> the model's, outside the layers and in one of them
    layers        path of the list of layers
    turned_heads  whether the rows of query and key projections are reordered
    norm_offset   what the stored weights of norms have more than the model's
    skipped       tensors that the model's config states already
    """

    outer: Mapping[str, str]
    block: Mapping[str, str | Parts]
    layers: str = "model.layers"
    turned_heads: bool = False
    norm_offset: float = 0.0
    skipped: frozenset[str] = frozenset({"rope_freqs.weight"})
    _stored: dict[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for theirs, ours in self.block.items():
            self._stored.update(dict.fromkeys((ours,) if isinstance(ours, str) else ours, theirs))

    def model_names(self, name: str) -> Parts | None:
        """The model's names of a tensor's parts; None when the architecture has no such tensor."""
        block = _BLOCK.fullmatch(name)
        if block is not None and block[2] in self.block:
            parts = self.block[block[2]]
            prefix = f"{self.layers}.{int(block[1])}"
            return tuple(f"{prefix}.{part}.{block[3]}" for part in ((parts,) if isinstance(parts, str) else parts))
        outer = _OUTER.fullmatch(name)
        return (f"{self.outer[outer[1]]}.{outer[2]}",) if outer is not None and outer[1] in self.outer else None

    def stored_name(self, name: str) -> str:
        """The name a file has for one of the model's; the name itself when it has none."""
        module, _, kind = name.rpartition(".")
        found = next((theirs for theirs, ours in self.outer.items() if ours == module), None)
        if found is not None:
            return f"{found}.{kind}"
        layer, _, rest = module.removeprefix(f"{self.layers}.").partition(".")
        if module.startswith(f"{self.layers}.") and layer.isdigit() and rest in self._stored:
            return f"blk.{layer}.{self._stored[rest]}.{kind}"
        return name


_EMBEDDINGS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION: dict[str, str | Parts] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP: dict[str, str | Parts] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_HEAD_NORMS: dict[str, str | Parts] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS: dict[str, str | Parts] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str | Parts]:
    return {
        "ffn_gate_inp": f"{block}.gate",
        "ffn_gate_exps": f"{block}.experts.{{}}.{gate}",
        "ffn_up_exps": f"{block}.experts.{{}}.{up}",
        "ffn_down_exps": f"{block}.experts.{{}}.{down}",
    }


_LLAMA = TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP}, turned_heads=True)
_MIXTRAL = TensorNames(_EMBEDDINGS, {**_ATTENTION, **_experts("block_sparse_moe", "w1", "w3", "w2")}, turned_heads=True)
_QWEN3_MOE = {
    **_ATTENTION, **_MLP, **_HEAD_NORMS, **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
}  # fmt: skip
_PHI3: dict[str, str | Parts] = {
    **_ATTENTION,
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn_down": "mlp.down_proj",
}
_GPT2: dict[str, str | Parts] = {
    "attn_norm": "ln_1",
    "attn_qkv": ("attn.c_attn",) * 3,
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_OUTER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}

TENSOR_NAMES: dict[str, TensorNames] = {
    "llama": _LLAMA,
    "qwen2": TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP}),
    "qwen3": TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP, **_HEAD_NORMS}),
    "qwen3moe": TensorNames(_EMBEDDINGS, _QWEN3_MOE),
    "gemma": TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP}, norm_offset=1.0),
    "gemma2": TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP, **_FOUR_NORMS}, norm_offset=1.0),
    "gemma3": TensorNames(_EMBEDDINGS, {**_ATTENTION, **_MLP, **_FOUR_NORMS, **_HEAD_NORMS}, norm_offset=1.0),
    "phi3": TensorNames(
        _EMBEDDINGS, _PHI3, skipped=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
    ),
    "gpt2": TensorNames(_GPT2_OUTER, _GPT2, layers="transformer.h"),
}


def names_of(architecture: str, with_experts: bool) -> TensorNames:
    """The names of an architecture that `config.gguf_facts` knows."""
    return _MIXTRAL if architecture == "llama" and with_experts else TENSOR_NAMES[architecture]
