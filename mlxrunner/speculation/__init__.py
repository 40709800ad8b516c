"""Guess the next tokens of an answer, so that one forward pass checks several. Never imports mlx."""
