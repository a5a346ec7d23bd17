"""Worlds that advance by a clock, whether or not their agents act.

May be imported by `core.worlds.sources`, and what is above the core.
"""
