"""Registers a load format as a reference, for `--load-format acme_npz`."""

from hardpoint.extensions.registry import registry


def register() -> None:
    """Runs in every process: the front end checks the name, the worker imports the class."""
    registry("model_loaders").register("acme_npz", "acme_model_loaders.npz:AcmeNpzLoader")
