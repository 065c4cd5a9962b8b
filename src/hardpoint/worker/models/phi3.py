"""Phi-3 and Phi-4: Llama whose checkpoints hold the projections fused as this model has them."""

from __future__ import annotations

from hardpoint.worker.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with its output head."""

    packed_modules_mapping = {
        "qkv_proj": ["qkv_proj"],
        "gate_up_proj": ["gate_up_proj"],
    }
