"""Conversations that survive: their text, settings and tokens as JSON, and beside it what the entry holds, as safetensors."""
