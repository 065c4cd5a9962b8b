"""`hardpoint bench`: measure a running server, or an engine in this process."""
