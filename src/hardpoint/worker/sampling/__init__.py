"""Choosing tokens from logits: constraints, penalties, custom processors, the draw, log-probabilities."""
