"""From the messages of a client to the tokens of a prompt, and from an answer to its parts."""
