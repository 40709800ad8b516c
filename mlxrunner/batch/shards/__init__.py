"""Cut a batch into shards, and merge what was answered of each."""
