"""Attention backends and how one is chosen."""
