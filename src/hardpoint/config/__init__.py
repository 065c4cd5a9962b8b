"""Configuration: sections with vLLM's field names, model facts, flags, and the steps that settle them."""
