"""What a server publishes: worlds that agents join."""
