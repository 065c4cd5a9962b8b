"""A toy plugin: one of each of the kinds people write first."""


def register() -> None:
    """The general plugin, called once in every process, so it must bear being called again elsewhere."""
    from vllm import ModelRegistry

    # A "module:Class" string: nothing is imported until a worker builds the model.
    if "ToyLlamaForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("ToyLlamaForCausalLM", "vllm_toy_plugin.model:ToyLlamaForCausalLM")

    # Importing the module runs its decorator.
    import vllm_toy_plugin.ops  # noqa: F401
