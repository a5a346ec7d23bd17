"""Worlds: environments that a server publishes, and that agents join."""
