"""Record what requests reused, why not more, and what that cost; read, report and replay it."""
