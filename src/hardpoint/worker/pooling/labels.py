"""How many labels a model's config means."""

from __future__ import annotations

from typing import Any


def num_labels_of(config: Any) -> int:
    """The labels of a classifier; two where the config does not say, as in transformers."""
    stated = getattr(config, "num_labels", None)
    if isinstance(stated, int) and stated > 0:
        return stated
    names = getattr(config, "id2label", None)
    return len(names) if names else 2
