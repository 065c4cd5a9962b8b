"""From a model's text to reasoning, content and tool calls, whole or as it comes."""
