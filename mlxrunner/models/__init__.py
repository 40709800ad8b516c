"""Find a model, check it, load it, and know its facts. mlx-lm computes the forward pass."""
