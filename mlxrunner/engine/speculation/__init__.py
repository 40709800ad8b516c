"""Guess what comes next in an answer, so that one forward pass checks several tokens."""
