"""How processes talk and how they end together: codec, sockets, children, worker links."""
