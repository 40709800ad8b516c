"""The protocols: each reads its requests into an `Asked` and writes the events of the answer."""
