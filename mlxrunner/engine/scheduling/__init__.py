"""Decide who runs: slots and their conversations, room, the row of each step, its time."""
