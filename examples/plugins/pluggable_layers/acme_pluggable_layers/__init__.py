"""Replaces a whole layer of ours by class name."""


def register() -> None:
    """Runs in every process; importing the module runs its decorator."""
    import acme_pluggable_layers.layers  # noqa: F401
