"""Replay recorded requests with other settings, without a model."""
