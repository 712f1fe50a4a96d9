"""What a running job tells the world: events as lines."""
