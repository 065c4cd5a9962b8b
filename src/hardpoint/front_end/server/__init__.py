"""The HTTP server: protocol models, routes, middleware, errors and endpoint plugins."""
