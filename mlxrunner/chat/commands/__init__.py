"""The commands of the chat, a file for each group."""
