"""Request and response bodies, with OpenAI's and vLLM's field names."""
