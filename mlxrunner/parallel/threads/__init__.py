"""Let any thread and any asyncio task use a runner: one thread owns the model."""
