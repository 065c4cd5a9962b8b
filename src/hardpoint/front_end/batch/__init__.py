"""OpenAI batch files: many requests read from a file, answered by the server's own routes, without a network."""
