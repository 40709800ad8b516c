"""Saved conversations: text, settings and tokens as JSON, the prefix-cache entry as safetensors."""
