"""Measure one model on this machine, alone and against mlx-lm.

Each figure is also given as a share of the most that the machine can do.
"""
