"""A local server for coding agents and chat programs, in the protocols that they speak."""
