"""Warm against cold on the user's own device and model: what reuse could change, measured against what the device changes by itself."""
