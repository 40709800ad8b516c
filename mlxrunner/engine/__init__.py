"""One request from its prompt to its last token: prepare, prefill, sample, decode, observe."""
