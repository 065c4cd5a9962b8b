"""KV cache blocks: hashing, the pool, per-request tables and the memory plan."""
