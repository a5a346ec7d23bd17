"""Worlds whose environment runs in a process of its own."""

__all__ = ["CALL_TIMEOUT"]

CALL_TIMEOUT = 300.0
"""Seconds that one call of an environment may take unless told otherwise."""
