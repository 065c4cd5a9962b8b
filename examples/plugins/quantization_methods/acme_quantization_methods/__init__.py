"""Registers a quantisation method as a reference, for `--quantization acme_int8`."""

from hardpoint.extensions.registry import registry


def register() -> None:
    """Runs in every process: the front end checks the name, the worker imports the class."""
    registry("quantization_methods").register("acme_int8", "acme_quantization_methods.int8:AcmeInt8Config")
