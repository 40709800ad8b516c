"""Many prompts from a file or an iterable, in the order that makes the one entry worth most."""
