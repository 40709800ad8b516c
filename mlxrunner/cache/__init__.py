"""The prefix-cache entry, its layer caches, and the caches that several sequences share."""
