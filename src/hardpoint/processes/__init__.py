"""One module per role: what runs in a process from its first line to its exit status."""
