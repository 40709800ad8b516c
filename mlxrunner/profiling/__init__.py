"""What every request reused, why not more, and what that cost: events, the token log, and those who read them."""
