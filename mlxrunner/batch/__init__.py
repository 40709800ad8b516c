"""Run many prompts from a file or an iterable, in the order in which the one entry saves most."""
