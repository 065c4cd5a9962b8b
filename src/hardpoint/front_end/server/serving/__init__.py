"""What the routes do: from a request body to prompts and parameters, and from outputs to an answer."""
