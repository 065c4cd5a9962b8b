"""Registers a backend as a reference, for `--structured-outputs-config.backend acme_choice`."""

from hardpoint.extensions.registry import registry


def register() -> None:
    """Runs in every process: the engine core and its grammar compilers import the class."""
    ref = "acme_structured_output_backends.choice:AcmeChoiceBackend"
    registry("structured_output_backends").register("acme_choice", ref)
