"""Record requests: events, token logs and metrics."""
