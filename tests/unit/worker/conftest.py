"""Makes `worker_fakes` importable from the folders below."""
