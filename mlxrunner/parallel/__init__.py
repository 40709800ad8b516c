"""Many requests at once on one model: slots that share prefixes, one row of tokens per step."""
