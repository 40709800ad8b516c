"""The terminal: safe text, keys, signals, progress and the clipboard."""
