"""A model over several ranks: the first has the entry and decides, the others follow."""
