"""What each `vllm...` module is made of, one file per area."""
