"""The model: Llama under a name of its own, where a real plugin would cut its layers in two."""

from vllm.model_executor.models.llama import LlamaForCausalLM


class AfdLikeLlamaForCausalLM(LlamaForCausalLM):
    """Runs any Llama checkpoint."""
