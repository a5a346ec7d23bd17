"""Worlds whose environment runs in a process of its own.

May be imported by `core.worlds.sources`, and what is above the core.
"""
