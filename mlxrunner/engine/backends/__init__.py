"""Run one row of tokens of many sequences through a model, each layer in the way that it can."""
