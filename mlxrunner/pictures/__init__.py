"""Pictures in prompts: reading them, what a model sees of them, and their places among tokens."""
