"""The engine core: it owns the requests, the KV cache and the workers, and runs one step after another."""
