"""Low-rank adapters: read from PEFT folders, cut to this rank, added to what layers compute."""
