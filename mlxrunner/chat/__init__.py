"""The terminal chat: a conversation that evaluates no token twice, and the loop around it."""
