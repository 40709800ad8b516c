"""Measure one model on this machine, alone and against mlx-lm.

Each figure has its share of the most that the machine can do.
"""
