"""The pages that say what the server does: health, metrics, slots, explanations."""
