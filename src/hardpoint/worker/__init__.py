"""The worker process: model, KV tensors, batch and sampler on one device."""
