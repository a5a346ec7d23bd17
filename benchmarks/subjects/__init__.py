"""What is measured: a module a kind of work."""
