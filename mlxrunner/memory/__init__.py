"""Plan memory before the first token, and prove the plan by reserving it."""
