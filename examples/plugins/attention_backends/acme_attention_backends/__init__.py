"""Registers an attention backend under a new name, for `--attention-backend ACME_ATTN`."""

from hardpoint.worker.attention.registry import AttentionBackendEnum, register_backend


def register() -> None:
    """Runs in every process: the front end checks the name, the worker imports the class."""
    if "ACME_ATTN" not in AttentionBackendEnum.__members__:
        register_backend("ACME_ATTN", "acme_attention_backends.backend.AcmeBackend")
