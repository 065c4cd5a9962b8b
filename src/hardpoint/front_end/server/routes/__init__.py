"""The routes, one module per subject; each has a `router`."""
