"""A batch over several processes or machines: who answers which lines, and what crosses the wire."""
