"""Registers a model class for an architecture, as a reference: nothing heavy is imported until a worker builds it."""

from hardpoint.worker.models.registry import ModelRegistry


def register() -> None:
    """Runs in every process."""
    ModelRegistry.register_model("AcmeForCausalLM", "acme_models.model:AcmeForCausalLM")
