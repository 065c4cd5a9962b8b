"""A general plugin in the manner of attention/FFN disaggregation: one function that takes part in every process.

It splits nothing; it shows the four things such a plugin does: patch a config check, choose a worker, read a key
of `--additional-config`, register a model by name.
"""


def register() -> None:
    """The general plugin: called once in every process, and harmless when it is called again."""
    from vllm import ModelRegistry

    from afd_like.patches import patch_config_check

    patch_config_check()
    # A "module:Class" string: nothing is imported until a worker builds the model.
    if "AfdLikeLlamaForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("AfdLikeLlamaForCausalLM", "afd_like.model:AfdLikeLlamaForCausalLM")
