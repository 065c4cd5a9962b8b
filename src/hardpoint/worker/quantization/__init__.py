"""Quantisation methods: how weights are stored and computed with."""
