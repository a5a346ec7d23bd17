"""Worlds whose environment runs in a process of its own."""
