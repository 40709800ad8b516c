"""Models: find one, check it, load it, know its facts. The forward pass itself is mlx-lm's."""
