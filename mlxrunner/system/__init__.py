"""The machine and its files: devices, limits, power, folders, and the only openers of files."""
