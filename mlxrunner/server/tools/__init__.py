"""Tool calls in answers: their formats, the reader of answers, and constraints on calls."""
