"""Constraints on what a model writes: compiled aside, kept by a mask over the vocabulary in each step."""
