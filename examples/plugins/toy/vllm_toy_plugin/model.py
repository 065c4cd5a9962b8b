"""The toy model: Llama under a name of its own."""

from vllm.model_executor.models.llama import LlamaForCausalLM


class ToyLlamaForCausalLM(LlamaForCausalLM):
    """Runs any Llama checkpoint; override a method here to change one thing."""
