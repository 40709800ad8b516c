"""Caches that hold many sequences at once, for parallel generation."""
