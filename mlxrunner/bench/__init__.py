"""Measurements of one model on this machine, alone and against mlx-lm: each figure as a share of what the machine can do at most."""
