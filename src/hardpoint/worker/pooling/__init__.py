"""What pooling models are made of: poolers, what they are told of a step, and the adapters of generating models."""
