"""Chat templates: rendering in a sandbox, thinking tags, and the parts of a message."""
