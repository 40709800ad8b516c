"""A batch over several processes or machines: who answers what, and what crosses the wire."""
