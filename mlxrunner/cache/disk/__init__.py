"""Entries of the prefix cache on disk: their format, and offloaded conversations."""
