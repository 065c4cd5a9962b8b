"""Replaces an operation of ours by class name."""


def register() -> None:
    """Runs in every process; importing the module runs its decorator."""
    import acme_oot_ops.ops  # noqa: F401
