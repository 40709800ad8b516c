"""The terminal chat: a conversation that never evaluates a token twice, and the loop that reads and prints."""
