"""Media in prompts: where they come from, how they are read, and what the model's processor makes of them."""
