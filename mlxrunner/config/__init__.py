"""The values of options from every source, the config file, and the names of other programs."""
